"""Test-only: the classes of the two models, what they are told, and how their latents are pictures.

Detection, weight loading and sampling stay the host's; only its list of model classes grows.
Imported after the host's modules. A latent is a picture from -1 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from comfy import latent_formats, supported_models

from .data import DIGITS, EMOJI, Sort

CONTEXT = 16
_WHOLE: dict[str, Any] = {
    "axes_dims": [8, 12, 12],
    "axes_lens": [64, 64, 64],
    "ffn_dim_multiplier": 8.0 / 3.0,
    "multiple_of": 32,
    "n_refiner_layers": 1,
    "rope_theta": 100.0,
    "time_scale": 1000.0,
    "z_image_modulation": False,
}


class Pixels(latent_formats.LatentFormat):  # type: ignore[misc]
    """Latents that are pictures; of one colour."""

    latent_channels = 1


class Colours(Pixels):
    """Of three."""

    latent_channels = 3


class Digits(supported_models.Lumina2):  # type: ignore[misc]
    """A NextDiT of width 96 over 14x14 pixels, 2x2 a token."""

    unet_config: ClassVar[dict[str, Any]] = {"image_model": "lumina2", "dim": 96}
    unet_extra_config: ClassVar[dict[str, Any]] = {**_WHOLE, "n_heads": 3, "n_kv_heads": 3}
    sampling_settings: ClassVar[dict[str, Any]] = {"multiplier": 1.0, "shift": 3.0}
    latent_format = Pixels
    patch_size, layers = 2, 14

    def __init__(self, found: dict[str, Any]) -> None:
        """Read what the host found in a file; it takes every such model for one of 16 channels."""
        channels = self.latent_format.latent_channels
        super().__init__({**found, "in_channels": channels, "patch_size": self.patch_size})

    @classmethod
    def whole(cls) -> dict[str, Any]:
        """The configuration of a model without a file."""
        size = {"cap_feat_dim": CONTEXT, "n_layers": cls.layers, "qk_norm": True}
        return {**cls.unet_config, **size}


class Emoji(Digits):
    """A NextDiT of width 128 over 32x32 pixels in colour, 4x4 a token."""

    unet_config: ClassVar[dict[str, Any]] = {"image_model": "lumina2", "dim": 128}
    unet_extra_config: ClassVar[dict[str, Any]] = {**_WHOLE, "n_heads": 4, "n_kv_heads": 4}
    latent_format = Colours
    patch_size, layers = 4, 12


CLASSES: dict[Sort, type[Digits]] = {DIGITS: Digits, EMOJI: Emoji}
"""The model of each sort of pictures."""


def conditioning(classes: Sequence[int]) -> list[Any]:
    """Return the CONDITIONING of a batch of pictures of these classes, or of `Sort.none`."""
    return [[tokens(torch.tensor(classes)), {}]]


def tokens(classes: torch.Tensor) -> torch.Tensor:
    """Return the fixed tokens [B, 2, CONTEXT] of classes [B]: one names it, one is always there."""
    pair = torch.stack([classes, torch.full_like(classes, CONTEXT - 1)], dim=1)
    return torch.nn.functional.one_hot(pair, CONTEXT).float() * math.sqrt(CONTEXT)


def to_pictures(latents: torch.Tensor) -> torch.Tensor:
    """Return the host's IMAGE [B, H, W, 3], 0 to 1, of latents [B, 1 or 3, H, W]."""
    colours = latents.expand(-1, 3, -1, -1)
    return (colours.float() / 2 + 0.5).clamp(0, 1).movedim(1, -1)


_known = {known.__name__ for known in supported_models.models}
supported_models.models[:0] = [each for each in CLASSES.values() if each.__name__ not in _known]
