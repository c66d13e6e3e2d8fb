"""One sampler run under Step Cache: what the user chose for it, and which steps are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..caching import run as caching
from ..caching.run import in_range
from ..caching.tally import FORECAST, FULL, Tally
from ..host_api import sampling
from .forecast import Forecast, Kept
from .schedule import LAST, Schedule, count, forced, spread, within_reach

#: Of a run: fewer have nothing to leave out.
FEWEST_STEPS = 10
#: At the beginning: a line needs two.
FEWEST_FIRST = 2


@dataclass(frozen=True)
class StepCacheOptions:
    """What the user chose on the node; the defaults are the best of those that were measured
    (docs/step-cache.md).

    Attributes:
        speed: steps made for each one that is computed; 1 changes nothing.
        first_full: how many at the beginning are computed, 2 at least.
        schedule: how the others are spread.
        forecast: how a step that is not computed is made up.
        start_percent, end_percent: the part of the run in which steps are forecast, 0 to 1.
        full_steps: of the custom schedule.
    """

    speed: float = 1.8
    first_full: int = 3
    schedule: Schedule = Schedule.EVEN
    forecast: Forecast = Forecast.AUTO
    start_percent: float = 0.0
    end_percent: float = 1.0
    full_steps: tuple[int, ...] = ()


class StepCacheRun(caching.CachedRun[Kept]):
    """One sampler run: its steps, the last two results of each of its calls, and counts of them.

    Attributes:
        steps: how many there are.
        full: those that are computed.
        is_flow: what sigma means (`host_api.sampling`).
        computed, forecast: the steps that were so.
    """

    def __init__(
        self, steps: int, full: frozenset[int], anew: frozenset[int], *, is_flow: bool
    ) -> None:
        """Set up; no step is made yet.

        Args:
            anew: steps before which kept results become invalid, because the evaluation changes.
        """
        super().__init__(Tally((FULL, FORECAST)))
        self.steps, self.full, self.is_flow = steps, full, is_flow
        self._anew = anew
        #: The step that was begun last, and the last of them that is computed.
        self._begun: int | None = None
        self._last = 0
        self.computed: set[int] = set()
        self.forecast: set[int] = set()

    @classmethod
    def begin(cls, options: StepCacheOptions, guider: Any, sigmas: torch.Tensor) -> StepCacheRun:
        """Return the run that a guider of the host's begins over these sigmas."""
        values = sigmas.tolist()  # the run's one wait for the GPU
        steps = len(values) - 1
        ends = [sampling.sigma_at(guider, p) for p in (options.start_percent, options.end_percent)]
        within = in_range(values, *ends)
        is_flow = sampling.is_flow(guider)
        anew = forced(values[:-1], sampling.boundaries(guider))
        certain = {*range(min(options.first_full, steps)), *range(steps - LAST, steps)}
        certain |= {n for n in range(steps) if n not in within}
        certain |= {after for n in anew for after in (n, n + 1) if after < steps}
        if options.schedule is Schedule.CUSTOM:
            certain |= set(options.full_steps) & set(range(steps))
            return cls(steps, frozenset(certain), anew, is_flow=is_flow)
        noise = [s if is_flow else s / (1.0 + s) for s in values[:-1]]
        number = count(steps, options.speed, options.first_full)
        full = within_reach(noise, spread(noise, certain, number, options.schedule), anew)
        return cls(steps, full, anew, is_flow=is_flow)

    def called_back(self, number: int) -> None:
        """As of any run; after the sampler went back, no full step lies behind it."""
        if number < self.step - 1:
            self._last = 0
        super().called_back(number)

    @property
    def is_full(self) -> bool:
        """Whether the current step is computed. At its beginning invalid results are freed, and
        those that the last computed step did not use.
        """
        is_full = self.step in self.full or self.step >= self.steps
        if self._begun != self.step:
            self._begun = self.step
            if self.step in self._anew:
                self.kept.clear()
            if is_full:
                last, self._last = self._last, self.step
                self.kept.keep_only(lambda each: each.last.step >= last)
        return is_full
