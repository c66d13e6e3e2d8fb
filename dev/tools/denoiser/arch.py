"""Test-only: the denoiser's class of model, what it is told, and how its latents are pictures.

Detection, weight loading and sampling stay the host's; only its list of model classes grows.
Imported after the host's modules. A latent is a picture of 64x64 pixels from -1 to 1: red, green,
blue and their mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from comfy import latent_formats, supported_models

from .pictures import CLASSES

CONTEXT = 32
UNCONDITIONAL = len(CLASSES)
"""The class that stands for none, for classifier-free guidance."""
_HEADS = {"num_heads": -1, "num_head_channels": 32}
CONFIG: dict[str, Any] = {  # three levels; transformers at the second and in the middle
    "image_size": 32,
    "use_checkpoint": False,
    "use_spatial_transformer": True,
    "legacy": False,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 64,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 1, 2],
    "transformer_depth": [0, 0, 1, 1, 0, 0],
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 0, 0, 0],
    "transformer_depth_middle": 1,
    "context_dim": CONTEXT,
    "use_linear_in_transformer": False,
    "adm_in_channels": None,
    "use_temporal_attention": False,
    "use_temporal_resblock": False,
    **_HEADS,
}
"""The UNet's configuration: exactly what the host's detection reads back from the weights."""


class Denoiser(supported_models.SD15):
    """SD1.5's noise schedule and prediction, without an autoencoder: latents are not scaled."""

    unet_config: ClassVar[dict[str, Any]] = {
        key: value for key, value in CONFIG.items() if key not in _HEADS
    }
    unet_extra_config: ClassVar[dict[str, Any]] = _HEADS
    latent_format = latent_formats.LatentFormat


def conditioning(classes: Sequence[int]) -> list[Any]:
    """Return the CONDITIONING of a batch of pictures of these classes, or of `UNCONDITIONAL`."""
    return [[tokens(torch.tensor(classes)), {}]]


def tokens(classes: torch.Tensor) -> torch.Tensor:
    """Return the fixed tokens [B, 2, CONTEXT] of classes [B]: one names it, one is always there."""
    pair = torch.stack([classes, torch.full_like(classes, CONTEXT - 1)], dim=1)
    return torch.nn.functional.one_hot(pair, CONTEXT).float() * math.sqrt(CONTEXT)


def to_latents(pictures: torch.Tensor) -> torch.Tensor:
    """Return the latents [B, 4, H, W] of pictures [B, H, W, 3], uint8; float32."""
    colours = pictures.movedim(-1, 1) / 127.5 - 1
    return torch.cat([colours, colours.mean(dim=1, keepdim=True)], dim=1)


def to_pictures(latents: torch.Tensor) -> torch.Tensor:
    """Return the host's IMAGE [B, H, W, 3], 0 to 1, of latents [B, 4, H, W]."""
    return (latents[:, :3].float() / 2 + 0.5).clamp(0, 1).movedim(1, -1)


if Denoiser.__name__ not in [known.__name__ for known in supported_models.models]:
    supported_models.models.append(Denoiser)
