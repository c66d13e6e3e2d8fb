"""Regions of the host's Wan VAEs (2.1, also Qwen-Image's, and 2.2).

Regions: each norm with its SiLU, and spatial upsampling. Convolutions over time and their caches
stay the host's; its operators keep the channels-last layout that regions produce.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch

from ..contract import InputSpec, Symbol
from ..kinds.layout import CHANNELS_LAST
from ..plans.family import Family
from ..plans.pairs import norm_and_activation
from ..plans.plan import Dispatch, Form, Place, Plan, dispatch_one, host_forward, unknown_layer
from . import image_vae

NAME = "wan_vae"

#: The decoder takes up to four frames at a time.
SYMBOLS = image_vae.SYMBOLS | {"frames": Symbol("frames", 1, 4096, 4)}


class NormSiLU(Form):
    """RMS_norm and SiLU: `x [batch, C, frames, height, width]` -> the same."""

    family = NAME
    name = "norm_silu"
    layout = CHANNELS_LAST

    def label(self, module: Any) -> str:
        return f"Wan VAE norm {module.gamma.shape[0]}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        dims = ("batch", module.gamma.shape[0], "frames", "height", "width")
        return (InputSpec("x", dtype, dims),)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return torch.nn.functional.silu(host_forward(module, *inputs))


class Up(Form):
    """Resample's work on each frame: `x [batch, C, height, width]` -> twice each side."""

    family = NAME
    name = "up"
    layout = CHANNELS_LAST

    def label(self, module: Any) -> str:
        return f"Wan VAE upsampling {module[1].in_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("batch", module[1].in_channels, "height", "width")),)


FORMS: dict[str, Form] = {form.name: form for form in (NormSiLU(), Up())}


def plan_wan(model: Any) -> Plan:
    from comfy.ldm.wan import vae as wan21
    from comfy.ldm.wan import vae2_2 as wan22

    plan = Plan(symbols=SYMBOLS)
    for name, layer in model.named_modules():
        cls = type(layer)
        if cls in (wan21.ResidualBlock, wan22.ResidualBlock):
            plan.dispatches += _pairs(f"{name}.residual", layer.residual, wan21.RMS_norm)
        elif cls in (wan21.Encoder3d, wan21.Decoder3d, wan22.Encoder3d, wan22.Decoder3d):
            plan.dispatches += _pairs(f"{name}.head", layer.head, wan21.RMS_norm)
        elif cls in (wan21.Resample, wan22.Resample) and layer.mode.startswith("upsample"):
            place = Place(f"{name}.resample", layer.resample, FORMS["up"])
            plan.dispatches.append(dispatch_one(place))
        elif issubclass(cls, (wan21.ResidualBlock, wan22.ResidualBlock)):
            plan.outside.append((name, unknown_layer(layer)))
    return plan


FAMILY = Family(
    title="VAEs of Wan",
    roots={"comfy.ldm.wan.vae:WanVAE": plan_wan, "comfy.ldm.wan.vae2_2:WanVAE": plan_wan},
    forms=FORMS,
)


def _pairs(name: str, layers: Iterable[torch.nn.Module], norm_class: type) -> Iterator[Dispatch]:
    """Each norm directly followed by a SiLU in a chain of layers."""
    for i, (norm, act) in enumerate(pairwise(layers)):
        if type(norm) is norm_class and type(act) is torch.nn.SiLU:
            place = Place(f"{name}.{i}", norm, FORMS["norm_silu"])
            yield norm_and_activation(place, norm, act)
