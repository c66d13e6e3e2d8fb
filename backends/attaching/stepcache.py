"""Step Cache on a MODEL: a clone of the host's ModelPatcher with three wrappers under its own key,
around all others.
"""

from __future__ import annotations

from typing import Any

from ..events import Events
from ..host_api import models
from ..host_api import patcher as host
from ..stepcache.cache import StepCache
from ..stepcache.run import StepCacheOptions
from . import deepcache
from .attached import KEY

STEP_CACHE_KEY = f"{KEY}.stepcache"


def apply(
    model: Any, options: StepCacheOptions, events: Events, *, identifier: str
) -> tuple[Any, StepCache]:
    """Return a clone that runs under Step Cache, and that Step Cache; an earlier one on the model
    is replaced.
    """
    clone = host.clone(model)
    cache = StepCache(
        options,
        events,
        identifier=identifier,
        has_deepcache=lambda model: deepcache.carried(model) is not None,
    )
    host.wrap_outermost(clone, "SAMPLER_SAMPLE", STEP_CACHE_KEY, cache.around_sampler)
    host.wrap_outermost(clone, "PREDICT_NOISE", STEP_CACHE_KEY, cache.around_evaluation)
    host.wrap_outermost(clone, "CALC_COND_BATCH", STEP_CACHE_KEY, cache.around_batch)
    host.attach(clone, STEP_CACHE_KEY, cache)
    return clone, cache


def carried(thing: Any) -> StepCache | None:
    """Return the Step Cache that a ModelPatcher carries; None for anything else of the host's."""
    if not models.is_model(thing):
        return None
    found: StepCache | None = host.attached(thing, STEP_CACHE_KEY)
    return found
