"""How far the processor may be ahead of the GPU in a long step, so that a cancel ends it soon.

What is queued on a GPU cannot be taken back. The processor is through with a step of seconds in
milliseconds, and a cancel would come when all of it is queued. So at each place it waits until the
GPU is near.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from ..device import gpu

#: Places that may be queued beyond the one that the GPU computes.
AHEAD = 2
#: Shorter steps are queued as a whole: a cancel comes after them.
LONG_S = 0.25


class Lookahead:
    """Of one root module's calls."""

    def __init__(self) -> None:
        self._marks: deque[Any] = deque()
        self._begun: float | None = None
        self._is_long = True  # until a step has shown how long it takes

    def begin_run(self) -> None:
        """Nothing is known of the steps that come."""
        self._begun, self._is_long = None, True

    def begin_step(self) -> None:
        """Take the time since the last step began: in a long one the processor waits for the GPU,
        so that is what it took.
        """
        now = time.perf_counter()
        if self._begun is not None:
            self._is_long = now - self._begun >= LONG_S
        self._begun = now
        self._marks.clear()

    def wait(self, device: torch.device) -> None:
        """Wait until the GPU has come near enough; to be called before a place is queued."""
        if not self._is_long:
            return
        if len(self._marks) >= AHEAD:
            gpu.wait_for(self._marks.popleft())
        self._marks.append(gpu.mark(device))
