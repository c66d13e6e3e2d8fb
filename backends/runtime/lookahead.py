"""How far the processor may be ahead of the GPU in a long step, so that a cancel ends it soon.

What is queued on a GPU cannot be taken back. The processor is through with a step of seconds in
milliseconds, and a cancel would come when all of it is queued. So at each place it waits until the
GPU is near: no further than it computes in a moment.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from ..device import gpu

#: Places that may be queued beyond the one that the GPU computes, at most;
AHEAD = 2
#: and what they may take together, in seconds. Longer places are queued when the GPU comes to them,
#: which costs it one launch each.
AHEAD_S = 0.1
#: Shorter steps are queued as a whole: a cancel comes after them.
LONG_S = 0.25


class Lookahead:
    """Of one root module's calls."""

    def __init__(self) -> None:
        self._marks: deque[Any] = deque()
        self._begun: float | None = None
        self._places = 0
        #: How many may be queued ahead; None: all of a short step.
        self._ahead: int | None = 1  # until a step has shown how long it takes

    def begin_run(self) -> None:
        """Nothing is known of the steps that come."""
        self._begun, self._ahead = None, 1

    def begin_step(self) -> None:
        """Take the time since the last step began: in a long one the processor waits for the GPU,
        so that is what it took.
        """
        now = time.perf_counter()
        if self._begun is not None:
            took = now - self._begun
            self._ahead = None
            if took >= LONG_S:
                self._ahead = min(AHEAD, int(AHEAD_S * self._places / took))
        self._begun, self._places = now, 0
        self._marks.clear()

    def wait(self, device: torch.device) -> None:
        """Wait until the GPU has come near enough; to be called before a place is queued."""
        self._places += 1
        if self._ahead is None:
            return
        self._marks.append(gpu.mark(device))
        if len(self._marks) > self._ahead:
            gpu.wait_for(self._marks.popleft())
