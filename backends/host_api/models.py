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


def called_module(model: Any) -> Any:
    """Return the module that a model's next call goes to; another node may have put it there."""
    return model.diffusion_model


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


def settings(patcher: Any) -> Mapping[str, Any]:
    """Return a diffusion model's settings, as the host's detection read them from its file."""
    found: Mapping[str, Any] = patcher.model.model_config.unet_config
    return found


def latent_shape(patcher: Any, rows: int, width: int, height: int) -> tuple[int, ...]:
    """Return the shape of the latent of an image.

    Args:
        rows: of the batch as the model sees it.
        width, height: in pixels.
    """
    form = patcher.model.latent_format
    scale = getattr(form, "spacial_downscale_ratio", 8)
    frames = (1,) * (getattr(form, "latent_dimensions", 2) - 2)
    return (rows, form.latent_channels, *frames, height // scale, width // scale)


def run_forward(patcher: Any, latent: tuple[int, ...], inputs: Mapping[str, Any]) -> None:
    """Run one model evaluation on an empty latent, with the patcher's own wrappers.

    Args:
        latent: its shape; its first side is the batch as the model sees it.
        inputs: what the model takes besides: shapes of empty tensors, and plain values.
    """
    import comfy.model_management as management
    from comfy.patcher_extension import merge_nested_dicts

    management.load_models_gpu([patcher])
    model, device = patcher.model, patcher.load_device
    options = dict(patcher.model_options.get("transformer_options", {}))
    options["wrappers"] = merge_nested_dicts(options.get("wrappers", {}), patcher.wrappers)
    given = {
        name: torch.zeros(value, device=device) if isinstance(value, tuple) else value
        for name, value in inputs.items()
    }
    patcher.pre_run()
    try:
        with torch.inference_mode():
            model.apply_model(
                torch.zeros(latent, device=device),
                torch.ones(latent[0], device=device),
                transformer_options=options,
                **given,
            )
    finally:
        patcher.cleanup()
