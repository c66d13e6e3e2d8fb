"""What a loaded MODEL is asked, and one evaluation of it on empty inputs.

Relies on the host's `comfy/model_patcher.py` (`ModelPatcher`) and `comfy/model_base.py`
(`BaseModel`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

_CLASS = "diffusion_model.__class__"


def is_model(thing: Any) -> bool:
    """Tell whether a thing is a MODEL, the host's or one of a subclass."""
    cls = getattr(sys.modules.get("comfy.model_patcher"), "ModelPatcher", None)
    return cls is not None and isinstance(thing, cls)


def diffusion_model(patcher: Any) -> torch.nn.Module:
    """Return the module within a MODEL that makes the steps."""
    root: torch.nn.Module = patcher.model.diffusion_model
    return root


def compute_dtype(patcher: Any) -> torch.dtype:
    """Return the dtype in which a model's operators compute."""
    manual: torch.dtype | None = patcher.get_model_object("manual_cast_dtype")
    stored: torch.dtype = patcher.model.get_dtype()
    return manual if manual is not None else stored


def load_device(patcher: Any) -> torch.device:
    """Return the device on which a patcher's model runs."""
    device: torch.device = patcher.load_device
    return device


def patched_objects(patcher: Any) -> Mapping[str, Any]:
    """Return what other nodes put into a patcher's model in place of its parts, by name."""
    patches: Mapping[str, Any] = patcher.object_patches
    return patches


def patched_parts(patcher: Any) -> Mapping[str, Any]:
    """Return the same for the MODEL that runs now on a patcher's model, of its diffusion model.

    What lies around that (sampling, dtypes) is no part of it.
    """
    current = getattr(patcher.model, "current_patcher", None)
    patches: Mapping[str, Any] = getattr(current, "object_patches", {})
    return {n: patch for n, patch in patches.items() if n.startswith("diffusion_model")}


def own_class(patcher: Any) -> type:
    """Return the class that a MODEL's diffusion model has when no clone of it is loaded.

    What other nodes put in its place for some clone is in it from that clone's loading on.
    """
    own: type = patcher.object_patches_backup.get(_CLASS, type(diffusion_model(patcher)))
    return own


def run_forward(patcher: Any, batch: int, height: int, width: int) -> None:
    """Run one model evaluation on empty inputs, with the patcher's own wrappers.

    Args:
        batch: rows of the batch as the model sees it.
        height, width: sides of the latent.
    """
    import comfy.model_management as management
    from comfy.patcher_extension import merge_nested_dicts

    management.load_models_gpu([patcher])
    model, device = patcher.model, patcher.load_device
    config = model.model_config.unet_config
    options = dict(patcher.model_options.get("transformer_options", {}))
    options["wrappers"] = merge_nested_dicts(options.get("wrappers", {}), patcher.wrappers)
    extra: dict[str, Any] = {}
    if config.get("adm_in_channels"):
        extra["y"] = torch.zeros(batch, config["adm_in_channels"], device=device)
    patcher.pre_run()
    try:
        with torch.inference_mode():
            channels = model.latent_format.latent_channels
            concatenated = config["in_channels"] - channels  # inpainting: mask and masked image
            if concatenated:
                extra["c_concat"] = torch.zeros(batch, concatenated, height, width, device=device)
            model.apply_model(
                torch.zeros(batch, channels, height, width, device=device),
                torch.ones(batch, device=device),
                c_crossattn=torch.zeros(batch, 77, config["context_dim"], device=device),
                transformer_options=options,
                **extra,
            )
    finally:
        patcher.cleanup()
