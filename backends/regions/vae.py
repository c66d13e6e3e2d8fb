"""The region plan of the host's image VAEs: the AutoencoderKL family (SD1.5, SDXL, SD3, Flux).

Regions: residual block, attention, up- and downsampling. The first and last convolutions, the last
norm and the quantisation stay the host's. Blocks with 3-D convolutions (video VAEs) run as without
Warmgraph, and say so.
"""

from __future__ import annotations

from typing import Any

import torch

from ..contract import InputSpec, Symbol
from .plan import (
    Call,
    Form,
    Forward,
    Place,
    Plan,
    dispatch_one,
    host_forward,
    unary,
    unknown_layer,
)

FAMILY = "vae"

#: Sides of activations: from one latent pixel up to an image of 8192 pixels.
SYMBOLS = {
    s.name: s
    for s in (
        Symbol("batch", 1, 64, 2),
        Symbol("height", 1, 8192, 312),
        Symbol("width", 1, 8192, 264),
        # Halving a side of one pixel leaves nothing.
        Symbol("even_height", 2, 8192, 312),
        Symbol("even_width", 2, 8192, 264),
    )
}


class Residual:
    """ResnetBlock: `x [batch, C, height, width]` -> `[batch, C', height, width]`."""

    family = FAMILY
    name = "residual"
    children: tuple[str, ...] | None = None

    def label(self, module: Any) -> str:
        return f"VAE ResnetBlock {module.in_channels}->{module.out_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("batch", module.in_channels, "height", "width")),)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return host_forward(module, *inputs)


class Attention:
    """AttnBlock: `x [batch, C, height, width]` -> the same shape; the attention function is the one
    that the host chose for this process."""

    family = FAMILY
    name = "attention"
    children: tuple[str, ...] | None = None

    def label(self, module: Any) -> str:
        return f"VAE attention {module.in_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("batch", module.in_channels, "height", "width")),)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return host_forward(module, *inputs)


class Up:
    """Upsample: `x [batch, C, height, width]` -> twice each side."""

    family = FAMILY
    name = "up"
    children: tuple[str, ...] | None = None

    def label(self, module: Any) -> str:
        return f"VAE Upsample {module.conv.in_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("batch", module.conv.in_channels, "height", "width")),)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return host_forward(module, *inputs)


class Down:
    """Downsample: `x [batch, C, height, width]` -> half of each side, rounded down."""

    family = FAMILY
    name = "down"
    children: tuple[str, ...] | None = None

    def label(self, module: Any) -> str:
        return f"VAE Downsample {module.conv.in_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        channels = module.conv.in_channels
        return (InputSpec("x", dtype, ("batch", channels, "even_height", "even_width")),)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return host_forward(module, *inputs)


FORMS: dict[str, Form] = {
    "residual": Residual(),
    "attention": Attention(),
    "up": Up(),
    "down": Down(),
}


def plan_vae(model: Any) -> Plan:
    """Cut a first-stage model into regions, wherever in it the host's 2-D image blocks are."""
    from comfy.ldm.modules.diffusionmodules.model import (
        AttnBlock,
        Downsample,
        ResnetBlock,
        Upsample,
    )

    plan = Plan(symbols=SYMBOLS)
    for name, layer in model.named_modules():
        cls = type(layer)
        if not issubclass(cls, (ResnetBlock, AttnBlock, Upsample, Downsample)):
            continue
        if (problem := _problem(layer)) is not None:
            plan.outside.append((name, problem))
        elif cls is ResnetBlock:
            plan.dispatches.append(dispatch_one(Place(name, layer, FORMS["residual"]), _residual))
        elif cls is AttnBlock:
            plan.dispatches.append(dispatch_one(Place(name, layer, FORMS["attention"]), unary))
        elif cls is Upsample:
            plan.dispatches.append(dispatch_one(Place(name, layer, FORMS["up"]), _carried))
        elif cls is Downsample:
            plan.dispatches.append(dispatch_one(Place(name, layer, FORMS["down"]), _carried))
        else:
            plan.outside.append((name, unknown_layer(layer)))
    return plan


def _problem(layer: Any) -> str | None:
    """Why an image block of the host is not one of those that the forms stand for."""
    convolutions = [m for m in layer.modules() if isinstance(m, torch.nn.modules.conv._ConvNd)]
    if not convolutions or not all(isinstance(m, torch.nn.Conv2d) for m in convolutions):
        return "3-D convolutions (video VAEs) have no region yet"
    if hasattr(layer, "temb_proj"):
        return "VAE blocks with a time embedding have no region yet"
    return None


def _residual(call: Call, host: Forward) -> Forward:
    def forward(
        x: torch.Tensor,
        temb: Any = None,
        conv_carry_in: Any = None,
        conv_carry_out: Any = None,
    ) -> torch.Tensor:
        result = call(x) if temb is None else call.decline("called with a time embedding")
        if result is not None:
            return result
        return host(x, temb, conv_carry_in=conv_carry_in, conv_carry_out=conv_carry_out)

    return forward


def _carried(call: Call, host: Forward) -> Forward:
    def forward(
        x: torch.Tensor, conv_carry_in: Any = None, conv_carry_out: Any = None
    ) -> torch.Tensor:
        result = call(x)
        return host(x, conv_carry_in, conv_carry_out) if result is None else result

    return forward
