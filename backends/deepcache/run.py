"""One sampler run under DeepCache: what the user chose for it, and which steps are full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..caching import run as caching
from ..caching.run import in_range
from ..caching.tally import FULL, SHALLOW, Tally
from ..host_api import sampling
from .schedule import Drift, Schedule, custom, quadratic, uniform


@dataclass(frozen=True)
class DeepCacheOptions:
    """What the user chose on the node; the defaults are the best of those that were measured
    (docs/deepcache.md).

    Attributes:
        interval: steps from one full step to the next.
        branch: where the UNet is cut, 0 being the outermost; beyond its depth, the deepest.
        start_percent, end_percent: the part of the run in which steps are shallow, 0 to 1.
        center, power: of the quadratic schedule.
        full_steps: of the custom schedule.
        threshold: of the adaptive schedule (`schedule.Drift`).
    """

    interval: int = 3
    branch: int = 0
    schedule: Schedule = Schedule.QUADRATIC
    start_percent: float = 0.0
    end_percent: float = 1.0
    center: float = 0.0
    power: float = 1.2
    full_steps: tuple[int, ...] = ()
    threshold: float = 0.4

    def full(self, steps: range) -> frozenset[int]:
        """Return which of these steps compute the whole UNet."""
        if self.schedule is Schedule.CUSTOM:
            return custom(steps, self.full_steps)
        if self.schedule is Schedule.QUADRATIC:
            return quadratic(steps, self.interval, center=self.center, power=self.power)
        return uniform(steps, self.interval)


class DeepCacheRun(caching.CachedRun[torch.Tensor]):
    """One sampler run: its steps, the features of its calls, and counts of them."""

    def __init__(
        self, steps: range, full: frozenset[int], drift: Drift | None, patcher: Any
    ) -> None:
        """Set up; no step is made yet.

        Args:
            steps: the steps that may be shallow.
            full: those among them that are full, where `drift` is None.
            drift: decides which of them are full; None: `full` does.
            patcher: the host's ModelPatcher that runs.
        """
        super().__init__(Tally((FULL, SHALLOW)))
        self._patcher = patcher
        self._last_full: int | None = None
        self._steps, self._full, self._drift = steps, full, drift

    @classmethod
    def begin(cls, options: DeepCacheOptions, guider: Any, sigmas: torch.Tensor) -> DeepCacheRun:
        """Return the run that a guider of the host's begins over these sigmas."""
        ends = [sampling.sigma_at(guider, p) for p in (options.start_percent, options.end_percent)]
        steps = in_range(sigmas.tolist(), *ends)  # the run's one wait for the GPU
        adaptive = options.schedule is Schedule.ADAPTIVE
        full = frozenset[int]() if adaptive else options.full(steps)
        drift = Drift(options.threshold) if adaptive else None
        return cls(steps, full, drift, sampling.sampled(guider))

    @property
    def hooks(self) -> Any:
        """The hooks that act on the model's weights now, or None."""
        return sampling.hooks(self._patcher)

    def is_full(self, x: torch.Tensor, sigmas: torch.Tensor | None) -> bool:
        """Whether this step computes the whole UNet; if so, what was kept is freed.

        Args:
            x, sigmas: of the next call; a step's first call decides for the whole step.
        """
        full = self._chosen(x, sigmas)
        if full and self._last_full != self.step:
            self._last_full = self.step
            self.kept.clear()
        return full

    def _chosen(self, x: torch.Tensor, sigmas: torch.Tensor | None) -> bool:
        if self.step not in self._steps:
            return True
        if self._drift is None:
            return self.step in self._full
        return self._drift.is_full(self.step, x, sigmas)

    @property
    def keeps(self) -> bool:
        """Whether a shallow step may come next, for which this one's feature is kept."""
        following = self.step + 1
        return following in self._steps and (self._drift is not None or following not in self._full)
