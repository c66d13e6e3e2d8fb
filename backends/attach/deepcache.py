"""DeepCache on a MODEL: a clone of the host's ModelPatcher with two wrappers under a key of its
own.
"""

from __future__ import annotations

from typing import Any

from ..deepcache.cache import DeepCache, Options
from .base import KEY
from .model import is_step

DEEPCACHE_KEY = f"{KEY}.deepcache"


def apply(model: Any, options: Options) -> tuple[Any, str | None]:
    """Return a clone that runs under DeepCache, or the model itself and why not.

    An earlier DeepCache on the model is replaced. Whatever else wraps the UNet, Compile Model among
    them, runs within it, in whichever order the nodes come.
    """
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
    from comfy.patcher_extension import WrappersMP

    unet = model.model.diffusion_model
    if type(unet) is not UNetModel:
        name = type(unet).__name__
        return model, (
            f"DeepCache needs a UNet, and this model is a {name}: it runs unchanged. "
            "ComfyUI's own EasyCache is for such models."
        )
    clone = model.clone()
    cache = DeepCache(unet, options, is_step)
    for kind, wrapper in (
        (WrappersMP.SAMPLER_SAMPLE, cache.around_sampler),
        (WrappersMP.DIFFUSION_MODEL, cache.around_unet),
    ):
        clone.remove_wrappers_with_key(kind, DEEPCACHE_KEY)
        clone.add_wrapper_with_key(kind, DEEPCACHE_KEY, wrapper)
        others = clone.wrappers[kind]
        clone.wrappers[kind] = {DEEPCACHE_KEY: others.pop(DEEPCACHE_KEY), **others}
    clone.set_attachments(DEEPCACHE_KEY, cache)
    return clone, None


def kept(thing: Any) -> DeepCache | None:
    """Return the DeepCache that a ModelPatcher carries; None for anything else of the host's."""
    from comfy.model_patcher import ModelPatcher

    if not isinstance(thing, ModelPatcher):
        return None
    found: DeepCache | None = thing.get_attachment(DEEPCACHE_KEY)
    return found
