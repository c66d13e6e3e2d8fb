"""DeepCache on a MODEL: a clone of the host's ModelPatcher with three wrappers under a key of
its own.
"""

from __future__ import annotations

from typing import Any

from ..deepcache.branches import Branch, depth
from ..deepcache.cache import DeepCache
from ..deepcache.run import Options
from ..errors import RequirementError
from ..events import Events
from ..runtime.session import Session
from .attached import KEY
from .model import is_step
from .model import kept as kept_session

DEEPCACHE_KEY = f"{KEY}.deepcache"
_CLASS = "diffusion_model.__class__"


def apply(
    model: Any, options: Options, events: Events, *, identifier: str
) -> tuple[Any, DeepCache]:
    """Return a clone that runs under DeepCache, and that DeepCache.

    An earlier DeepCache on the model is replaced. Whatever else wraps the UNet, Compile Model among
    them, runs within it, in whichever order the nodes come.

    Raises:
        RequirementError: the model has no UNet; the text says so for a user.
    """
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
    from comfy.patcher_extension import WrappersMP

    unet = model.model.diffusion_model
    # What other nodes put in its place for some clone is in it from that clone's loading on.
    own_class = model.object_patches_backup.get(_CLASS, type(unet))
    if own_class is not UNetModel:
        name = own_class.__name__
        raise RequirementError(
            f"DeepCache needs a UNet, and this model is a {name}: it runs unchanged. "
            "ComfyUI's own EasyCache is for such models."
        )
    clone = model.clone()
    cache = DeepCache(
        _branch(model, unet, options.branch),
        options,
        events,
        identifier=identifier,
        is_known=is_step,
    )
    for kind, wrapper in (
        (WrappersMP.SAMPLER_SAMPLE, cache.around_sampler),
        (WrappersMP.PREDICT_NOISE, cache.around_evaluation),
        (WrappersMP.DIFFUSION_MODEL, cache.around_unet),
    ):
        clone.remove_wrappers_with_key(kind, DEEPCACHE_KEY)
        clone.add_wrapper_with_key(kind, DEEPCACHE_KEY, wrapper)
        others = clone.wrappers[kind]
        clone.wrappers[kind] = {DEEPCACHE_KEY: others.pop(DEEPCACHE_KEY), **others}
    clone.set_attachments(DEEPCACHE_KEY, cache)
    return clone, cache


def _branch(model: Any, unet: Any, number: int) -> Branch:
    """The UNet cut in two: where Compile Model is on the model, the cut that its session keeps, so
    that what was captured for one DeepCache serves the next one, whatever its interval.
    """
    number = min(number, depth(unet) - 1)
    session = kept_session(model)
    if not isinstance(session, Session) or session.scope.root is not unet:
        return Branch(unet, number)
    return session.keep((DEEPCACHE_KEY, number), lambda: Branch(unet, number))


def kept(thing: Any) -> DeepCache | None:
    """Return the DeepCache that a ModelPatcher carries; None for anything else of the host's."""
    from comfy.model_patcher import ModelPatcher

    if not isinstance(thing, ModelPatcher):
        return None
    found: DeepCache | None = thing.get_attachment(DEEPCACHE_KEY)
    return found
