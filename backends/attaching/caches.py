"""The caches over the steps of a run that MODELs of this process carry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..deepcache.cache import DeepCache
from ..deepcache.run import DeepCacheOptions
from ..events import Events
from ..host_api.needs import Feature
from ..live import Live
from ..stepcache.cache import StepCache
from ..stepcache.run import StepCacheOptions
from . import deepcache, stepcache
from .objects import Objects


class Caches:
    """Puts them on clones of MODELs, and lists those still in use."""

    def __init__(self, objects: Objects, events: Events, numbers: Iterator[int]) -> None:
        """Set up; there is none.

        Args:
            objects: accepts the host's objects.
            events: gets the end of each run.
            numbers: for their names in reports.
        """
        self._objects, self._events, self._numbers = objects, events, numbers
        self._deepcaches: Live[DeepCache] = Live()
        self._stepcaches: Live[StepCache] = Live()

    def deepcache(self, model: Any, options: DeepCacheOptions) -> tuple[Any, str]:
        """Return a clone of a ModelPatcher that runs under DeepCache, and the id of its report.

        Raises:
            RequirementError: the model has no UNet; the text says so for a user.
        """
        self._objects.require(Feature.DEEPCACHE)
        return self._put(deepcache.apply, model, options, "deepcache", self._deepcaches)

    def stepcache(self, model: Any, options: StepCacheOptions) -> tuple[Any, str]:
        """Return a clone of a ModelPatcher that runs under Step Cache, and the id of its report.

        Raises:
            RequirementError: this host lacks something for it; the text says so for a user.
        """
        self._objects.require(Feature.STEP_CACHE)
        return self._put(stepcache.apply, model, options, "stepcache", self._stepcaches)

    def _put(
        self, apply: Callable[..., Any], model: Any, options: Any, sort: str, known: Live[Any]
    ) -> tuple[Any, str]:
        identifier = f"{sort}-{next(self._numbers)}"
        clone, cache = apply(model, options, self._events, identifier=identifier)
        known.add(identifier, cache)
        return clone, identifier

    def of(self, model: Any) -> tuple[DeepCache | None, StepCache | None]:
        """Return the caches of a MODEL; nothing for any other object."""
        return self._objects.deepcache(model), self._objects.stepcache(model)

    def all(self) -> tuple[list[DeepCache], list[StepCache]]:
        """Return those still in use."""
        return list(self._deepcaches.values()), list(self._stepcaches.values())
