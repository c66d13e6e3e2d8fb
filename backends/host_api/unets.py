"""The UNet as DeepCache takes it apart: its classes, its own forward, the sampler around it.

Relies on the host's `comfy/ldm/modules/diffusionmodules/openaimodel.py` (`UNetModel._forward`),
`comfy/ldm/modules/attention.py` and `comfy/samplers.py`.
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
    """Return the host's own classes, as they are now."""
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
    """Return a UNet's own forward, bound: what lies within all wrappers."""
    method: Callable[..., torch.Tensor] = unet._forward
    return method


def is_own_forward(function: Any, unet: Any) -> bool:
    """Tell whether a function is the forward of a UNet's class, bound."""
    return getattr(function, "__func__", None) is type(unet)._forward


def sigma_at(guider: Any, percent: float) -> float:
    """Return the sigma at a share of a guider's run."""
    return float(guider.inner_model.model_sampling.percent_to_sigma(percent))


def sampled(guider: Any) -> Any:
    """Return the MODEL that a guider samples, None where the host does not say."""
    return getattr(guider.inner_model, "current_patcher", None)


def hooks(patcher: Any) -> Any:
    """Return the hooks that act on a MODEL's weights now, or None."""
    return getattr(patcher, "current_hooks", None)
