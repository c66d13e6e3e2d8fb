"""Step Cache on one MODEL: what happens around a sampler run and around each evaluation of its
conditionings.

Each conditioning's denoised latent is forecast, before guidance, so that samplers and nodes that
use single ones get them. A call that equals one of the last two computed steps in everything that
shapes it is forecast; any other is computed. Only counts outlive the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..caching.cache import Cache
from ..caching.others import other_cache
from ..caching.patches import patches_of
from ..caching.places import EvaluationCall
from ..caching.tally import FORECAST, FULL
from ..events import Events
from ..host_api.options import TRANSFORMER, is_block_by_block, window_of
from ..host_api.sampling import ids_of, sampled
from ..reasons import Reason, of
from .forecast import Kept, computed, forecast
from .run import FEWEST_STEPS, StepCacheOptions, StepCacheRun


class StepCache(Cache[StepCacheRun]):
    """Forecasts some steps of each sampler run of one model."""

    name = "Step Cache"
    failed_key = "stepcache_failed"

    def __init__(
        self,
        options: StepCacheOptions,
        events: Events,
        *,
        identifier: str,
        has_deepcache: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        """Set up for one clone of a model.

        Args:
            options: what the user chose.
            events: gets the end of each run.
            identifier: its name in reports.
            has_deepcache: whether a MODEL runs under DeepCache, too.
        """
        super().__init__(events, identifier=identifier)
        self.options = options
        self._has_deepcache = has_deepcache
        #: Steps of the last run: all, computed ones, forecast ones; the most memory that was kept.
        self.steps, self.computed, self.forecast, self.kept_bytes = 0, 0, 0, 0
        self._most = 0

    def _begin(
        self, guider: Any, sigmas: torch.Tensor, extra: Any, *others: Any
    ) -> StepCacheRun | None:
        self.steps, self.computed, self.forecast, self._most = len(sigmas) - 1, 0, 0, 0
        options: Mapping[str, Any] = extra.get("model_options", {})
        if (why := self._why_not(guider, options)) is not None:
            self._step_aside(why)
        elif self.options.speed > 1 or self.options.full_steps:
            return StepCacheRun.begin(self.options, guider, sigmas)
        return None

    def _why_not(self, guider: Any, options: Mapping[str, Any]) -> Reason | None:
        """Why the host makes a whole run, if so."""
        if (theirs := other_cache(sampled(guider), options)) is not None:
            return theirs
        if self._has_deepcache(sampled(guider)):
            return of("stepcache_deepcache")
        if self.steps < FEWEST_STEPS:
            return of("stepcache_few", steps=self.steps, least=FEWEST_STEPS)
        return None

    def _ended(self, run: StepCacheRun) -> None:
        super()._ended(run)
        self.computed, self.forecast = len(run.computed), len(run.forecast - run.computed)
        self.kept_bytes = self._most

    def around_batch(
        self,
        executor: Any,
        model: Any,
        conditionings: list[Any],
        x: torch.Tensor,
        sigma: torch.Tensor,
        options: dict[str, Any],
        *others: Any,
        **named: Any,
    ) -> Any:
        """The host's CALC_COND_BATCH wrapper: the denoised latents of some roles' conditionings."""
        run = self._run
        given = (model, conditionings, x, sigma, options, *others)
        if run is None or self.problem is not None:
            return executor(*given, **named)
        place = self._guarded(self._place, run, model, conditionings, x, options)
        if place is None:
            return executor(*given, **named)
        if (made := self._guarded(self._forecast, run, place, x, sigma)) is not None:
            return made
        ended = None if self.problem else self._guarded(self._time, run, FULL, place, x.device)
        found = executor(*given, **named)
        if ended is not None:
            self._guarded(self._keep, run, place, x, sigma, found)
            self._guarded(ended)
        return found

    def _place(
        self,
        run: StepCacheRun,
        model: Any,
        conditionings: list[Any],
        x: torch.Tensor,
        options: Mapping[str, Any],
    ) -> EvaluationCall | None:
        """Return a call's place; None: the host makes it and all others of this run."""
        inner = options.get(TRANSFORMER, {})
        if is_block_by_block(inner):
            self._step_aside(of("stepcache_blocks"))
            return None
        ids = tuple(map(ids_of, conditionings))
        shape = (ids, window_of(inner), (tuple(x.shape), x.dtype, x.device), id(model))
        return run.kept.place(shape, patches_of(inner, None))

    def _time(
        self, run: StepCacheRun, sort: str, place: EvaluationCall, device: torch.device
    ) -> Callable[[], None]:
        """Count a call and begin to time it; the returned function ends that."""
        chunks = [(each, role) for role, each in enumerate(_ids(place)) if each is not None]
        return run.tally.begin(sort, chunks, device)

    def _forecast(
        self,
        run: StepCacheRun,
        place: EvaluationCall,
        x: torch.Tensor,
        sigma: torch.Tensor,
    ) -> list[torch.Tensor] | None:
        """A call's result by forecast; None: it must be computed."""
        is_full, kept = run.is_full, run.kept.find(place)
        if is_full or kept is None or kept.before is None:
            return None
        ended = self._time(run, FORECAST, place, x.device)
        share = self.options.forecast.share
        made = forecast(kept, x, sigma, share, is_flow=run.is_flow)
        ended()
        run.forecast.add(run.step)
        self.evaluations[FORECAST] += 1
        return made

    def _keep(
        self,
        run: StepCacheRun,
        place: EvaluationCall,
        x: torch.Tensor,
        sigma: torch.Tensor,
        found: list[torch.Tensor],
    ) -> None:
        """Keep a call's result beside that of the step before."""
        run.computed.add(run.step)
        self.evaluations[FULL] += 1
        are_there = [each is not None for each in _ids(place)]
        now = computed(run.step, x, sigma, found, are_there, is_flow=run.is_flow)
        kept = run.kept.find(place)
        run.kept.keep(place, Kept(now) if kept is None else kept.then(now))
        self._most = max(self._most, sum(each.bytes for each in run.kept))


def _ids(place: EvaluationCall) -> Sequence[Any]:
    ids: Sequence[Any] = place.shape[0]
    return ids
