"""DeepCache on a MODEL: a clone of the host's ModelPatcher with three wrappers of its own."""

from __future__ import annotations

from typing import Any

from ..deepcache.branches import Branch, depth
from ..deepcache.cache import DeepCache
from ..deepcache.run import DeepCacheOptions
from ..errors import RequirementError
from ..events import Events
from ..host_api import models, unets
from ..host_api import patcher as host
from ..reasons import of
from ..runtime.session import Session
from .attached import KEY
from .evaluation import is_step
from .model import carried as carried_session

DEEPCACHE_KEY = f"{KEY}.deepcache"


def apply(
    model: Any, options: DeepCacheOptions, events: Events, *, identifier: str
) -> tuple[Any, DeepCache]:
    """Return a clone that runs under DeepCache, and that DeepCache.

    An earlier DeepCache on the model is replaced. Whatever else wraps the UNet, Compile Model among
    them, runs within it, in whichever order the nodes come.

    Raises:
        RequirementError: the model has no UNet; the text says so for a user.
    """
    unet = models.diffusion_model(model)
    own_class = models.own_class(model)
    if own_class is not unets.classes().unet:
        name = own_class.__name__
        raise RequirementError(of("deepcache_needs_unet", model=name))
    clone = host.clone(model)
    cache = DeepCache(
        _branch(model, unet, options.branch),
        options,
        events,
        identifier=identifier,
        is_known=is_step,
    )
    host.wrap_outermost(clone, "SAMPLER_SAMPLE", DEEPCACHE_KEY, cache.around_sampler)
    host.wrap_outermost(clone, "PREDICT_NOISE", DEEPCACHE_KEY, cache.around_evaluation)
    host.wrap_outermost(clone, "DIFFUSION_MODEL", DEEPCACHE_KEY, cache.around_unet)
    host.attach(clone, DEEPCACHE_KEY, cache)
    return clone, cache


def _branch(model: Any, unet: Any, number: int) -> Branch:
    """The UNet cut in two. With Compile Model on the model it is the cut that its session keeps, so
    that captures of one DeepCache serve the next one, whatever its interval.
    """
    number = min(number, depth(unet) - 1)
    session = carried_session(model)
    if not isinstance(session, Session) or session.scope.root is not unet:
        return Branch(unet, number)
    return session.keep((DEEPCACHE_KEY, number), lambda: Branch(unet, number))


def carried(thing: Any) -> DeepCache | None:
    """Return the DeepCache that a ModelPatcher carries; None for anything else of the host's."""
    if not models.is_model(thing):
        return None
    found: DeepCache | None = host.attached(thing, DEEPCACHE_KEY)
    return found
