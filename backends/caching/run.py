"""One sampler run, as a cache sees it: the current step, and what is kept of those before.

A sampler calls back in each step: what it evaluates between two callbacks is one step here. One
that evaluates twice a step (Heun, DPM2) calls back after the first, so the second counts to the
next step, which is at the same or a lower sigma. Nothing waits for the GPU to read a sigma.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from .places import Places
from .tally import Tally

V = TypeVar("V")


class CachedRun(Generic[V]):
    """Its steps, what is kept of its calls, and counts of them.

    Attributes:
        step: the one that is being made, from 0.
        kept: of calls in steps before.
        tally: counts and times.
    """

    def __init__(self, tally: Tally) -> None:
        """Set up; no step is made yet."""
        self.step = 0
        self.kept: Places[V] = Places()
        self.tally = tally

    def called_back(self, number: int) -> None:
        """The sampler has made a step's evaluation; what follows is the next step here."""
        if number < self.step - 1:  # it went back
            self.kept.clear()
        self.step = number + 1

    def let_go(self) -> None:
        """Free what is kept."""
        self.kept = Places()


def in_range(sigmas: Sequence[float], first_sigma: float, last_sigma: float) -> range:
    """Return the steps whose sigma lies between two sigmas, both included.

    Args:
        sigmas: of the run, falling; the last one is its end, not a step.
        first_sigma: the larger one, at which the part begins.
    """
    steps = range(len(sigmas) - 1)
    within = [n for n in steps if last_sigma <= sigmas[n] <= first_sigma]
    return range(within[0], within[-1] + 1) if within else range(0)
