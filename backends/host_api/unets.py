"""The UNet as DeepCache takes it apart: its classes and forward.

Relies on the host's `comfy/ldm/modules/diffusionmodules/openaimodel.py` (`UNetModel._forward`) and
`comfy/ldm/modules/attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

#: Arguments of the host's `UNetModel._forward`, in their order.
ARGUMENTS = ("x", "timesteps", "context", "y", "control", "transformer_options")


class Classes(NamedTuple):
    """The host's classes of a UNet and its layers."""

    unet: Any
    sequence: Any
    residual: Any
    transformer: Any
    down: Any
    up: Any


def classes() -> Classes:
    """Return the host's current classes."""
    from comfy.ldm.modules.attention import SpatialTransformer
    from comfy.ldm.modules.diffusionmodules import openaimodel as host

    return Classes(
        host.UNetModel,
        host.TimestepEmbedSequential,
        host.ResBlock,
        SpatialTransformer,
        host.Downsample,
        host.Upsample,
    )


def forward(unet: Any) -> Callable[..., torch.Tensor]:
    """Return a UNet's own forward, bound, within all wrappers."""
    method: Callable[..., torch.Tensor] = unet._forward
    return method


def is_own_forward(function: Any, unet: Any) -> bool:
    """Tell whether a function is the bound forward of a UNet's class."""
    return getattr(function, "__func__", None) is type(unet)._forward
