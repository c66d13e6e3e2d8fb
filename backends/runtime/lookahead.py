"""How far the processor may be ahead of the GPU in a long step, so that a cancel ends it soon.

What is queued on a GPU cannot be taken back. The processor queues a step of seconds in
milliseconds, so a cancel would take effect only after the whole step. So at each place it waits
until the GPU is close behind.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
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
        #: Elements of what the step that is made was called with, and of what sort that is.
        self._call: tuple[int, Hashable] = (0, ())
        #: The same of the last step of each sort, and how far ahead it was good to be.
        self._known: dict[Hashable, tuple[int, int | None]] = {}
        #: How many places may be queued ahead; None: all of a short step.
        self._ahead: int | None = 1

    def begin_run(self) -> None:
        """No step runs yet."""
        self._begun = None

    def begin_step(self, size: int, sort: Hashable) -> None:
        """Read the time of the step before. Until the time of such a step is known, the processor
        stays close.

        Args:
            size: elements of the step's input.
            sort: of that input; a VAE's images are another sort than its latents.
        """
        self._take()
        most, ahead = self._known.get(sort, (0, 1))
        self._ahead = ahead if size <= most else 1
        self._begun, self._call, self._places = time.perf_counter(), (size, sort), 0
        self._marks.clear()

    def end_run(self) -> None:
        """Read the time of the last step: a run may have only one, as a VAE's does."""
        self._take()

    def _take(self) -> None:
        """Read the time since a step began: in a long one the processor waits for the GPU, so that
        is its time.
        """
        begun, self._begun = self._begun, None
        if begun is None or not self._places:
            return
        took = time.perf_counter() - begun
        size, sort = self._call
        ahead = None if took < LONG_S else min(AHEAD, int(AHEAD_S * self._places / took))
        self._known[sort] = size, ahead

    def wait(self, device: torch.device) -> None:
        """Wait until the GPU is close enough; to be called before a place is queued."""
        self._places += 1
        if self._ahead is None:
            return
        self._marks.append(gpu.mark(device))
        if len(self._marks) > self._ahead:
            gpu.wait_for(self._marks.popleft())
