"""Models by the class and settings that the host detects for their files.

Relies on the host's `comfy/supported_models.py`, `comfy/model_detection.py` and
`comfy/model_base.py` (`BaseModel.diffusion_model`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def root_of(name: str, settings: Mapping[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    """Build a diffusion model, with weights as its constructor leaves them.

    Args:
        name: of the model's class in the host's list.
        settings: as the host detected them from a file.
        dtype: that the model computes in.
    """
    import comfy.supported_models

    config = getattr(comfy.supported_models, name)(dict(settings))
    config.set_inference_dtype(dtype, None)
    root: torch.nn.Module = config.get_model({}, "", device=torch.device("cpu")).diffusion_model
    return root


def detected(model: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a loaded model's class in the host's list, and its settings."""
    config = model.model_config
    return type(config).__name__, config.unet_config


def detected_file(path: str) -> tuple[str, Mapping[str, Any], tuple[int, ...]] | None:
    """Return the same of a file, without its weights, and a latent's shape; None if unknown."""
    from comfy import model_detection
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        shapes = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        weights = {
            name: torch.empty(each.get_shape(), device="meta", dtype=torch.float32)
            for name, each in shapes.items()
        }
    prefix = model_detection.unet_prefix_from_state_dict(weights)
    if not any(name.startswith(prefix) for name in weights):
        prefix = ""
    config = model_detection.model_config_from_unet(weights, prefix)
    if config is None:
        return None
    form = config.latent_format
    frames = (1,) * (getattr(form, "latent_dimensions", 2) - 2)
    latent = (1, form.latent_channels, *frames, 32, 32)
    return type(config).__name__, config.unet_config, latent
