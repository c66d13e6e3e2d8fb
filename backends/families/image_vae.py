"""Regions of the host's image VAEs: the AutoencoderKL family (SD1.5, SDXL, SD3, Flux), TAESD.

Regions: residual block, before and after the attention, up- and downsampling, first and last
convolutions, last norm; TAESD's blocks. Attention and quantisation stay the host's. Blocks with 3-D
convolutions (video VAEs) run as the host's, named.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..contract import InputSpec, Symbol
from ..kinds.layout import CHANNELS_LAST
from ..plans.binding import TAKEN, Arguments
from ..plans.family import Family
from ..plans.plan import (
    Form,
    Place,
    Plan,
    RegionCall,
    dispatch_one,
    dispatch_several,
    host_forward,
    shallow_copy,
    unknown_layer,
)
from ..reasons import Reason, of

NAME = "vae"

#: Sides of activations: from one latent pixel up to an image of 8192 pixels.
SYMBOLS = {
    s.name: s
    for s in (
        Symbol("batch", 1, 4096, 2),
        Symbol("height", 1, 8192, 136),
        Symbol("width", 1, 8192, 120),
        # Halving a side of one pixel leaves nothing.
        Symbol("even_height", 2, 8192, 136),
        Symbol("even_width", 2, 8192, 120),
    )
}


class _VAEForm(Form):
    """What VAE forms share: most take one image, all of them channels-last."""

    family = NAME
    layout = CHANNELS_LAST

    def channels(self, module: Any) -> int:
        """Return the channels of the region's input."""
        raise NotImplementedError

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("batch", self.channels(module), "height", "width")),)


class Residual(_VAEForm):
    """ResnetBlock: `x [batch, C, height, width]` -> `[batch, C', height, width]`."""

    name = "residual"
    arguments = Arguments(
        x=TAKEN, temb=of("time_embedding"), conv_carry_in=None, conv_carry_out=None
    )

    def label(self, module: Any) -> str:
        return f"VAE ResnetBlock {module.in_channels}->{module.out_channels}"

    def channels(self, module: Any) -> int:
        return int(module.in_channels)


class AttentionEntry(_VAEForm):
    """AttnBlock up to its attention: `x [batch, C, height, width]` -> q, k, v as `[3 * batch,
    ...]`.
    """

    name = "attention_entry"
    children = ("norm", "q", "k", "v")
    hidden = ("optimized_attention",)

    def label(self, module: Any) -> str:
        return f"VAE attention entry {module.in_channels}"

    def channels(self, module: Any) -> int:
        return int(module.in_channels)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        seen: list[torch.Tensor] = []

        def take(*qkv: torch.Tensor) -> torch.Tensor:
            seen.extend(qkv)
            return qkv[0]

        cut = shallow_copy(module, proj_out=torch.nn.Identity())
        cut.optimized_attention = take  # type: ignore[assignment]
        host_forward(cut, inputs[0])
        return torch.cat(seen)


class AttentionExit(_VAEForm):
    """AttnBlock after its attention: `(attended, x)`, both `[batch, C, height, width]` -> same."""

    name = "attention_exit"
    children = ("proj_out",)
    hidden = ("optimized_attention",)

    def label(self, module: Any) -> str:
        return f"VAE attention exit {module.in_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        dims = ("batch", module.in_channels, "height", "width")
        return (InputSpec("attended", dtype, dims), InputSpec("x", dtype, dims))

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        same = torch.nn.Identity()
        cut = shallow_copy(module, norm=same, q=same, k=same, v=same)
        cut.optimized_attention = lambda *_: inputs[0]  # type: ignore[assignment]
        return host_forward(cut, inputs[1])


class Convolution(_VAEForm):
    """A first or last Conv2d: `x [batch, C, height, width]` -> `[batch, C', height, width]`."""

    name = "convolution"

    def label(self, module: Any) -> str:
        return f"VAE convolution {module.in_channels}->{module.out_channels}"

    def channels(self, module: Any) -> int:
        return int(module.in_channels)


class Norm(_VAEForm):
    """The last GroupNorm: `x [batch, C, height, width]` -> the same shape."""

    name = "norm"

    def label(self, module: Any) -> str:
        return f"VAE norm {module.num_channels}"

    def channels(self, module: Any) -> int:
        return int(module.num_channels)


#: What convolutions of a video carry from piece to piece does not concern those of an image.
_CARRIED = Arguments(x=TAKEN, conv_carry_in=None, conv_carry_out=None)


class Up(_VAEForm):
    """Upsample: `x [batch, C, height, width]` -> twice each side."""

    name = "up"
    arguments = _CARRIED

    def label(self, module: Any) -> str:
        return f"VAE Upsample {module.conv.in_channels}"

    def channels(self, module: Any) -> int:
        return int(module.conv.in_channels)


class Down(_VAEForm):
    """Downsample: `x [batch, C, height, width]` -> half of each side, rounded down."""

    name = "down"
    arguments = _CARRIED

    def label(self, module: Any) -> str:
        return f"VAE Downsample {module.conv.in_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        channels = module.conv.in_channels
        return (InputSpec("x", dtype, ("batch", channels, "even_height", "even_width")),)


class Tiny(_VAEForm):
    """TAESD's Block: `x [batch, C, height, width]` -> the same sides."""

    name = "tiny"

    def label(self, module: Any) -> str:
        return f"TAESD block {module.conv[0].in_channels}"

    def channels(self, module: Any) -> int:
        return int(module.conv[0].in_channels)


FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Residual(),
        AttentionEntry(),
        AttentionExit(),
        Convolution(),
        Norm(),
        Up(),
        Down(),
        Tiny(),
    )
}


def plan_vae(model: Any) -> Plan:
    """Cut every 2-D image block of the host's in a first-stage model."""
    from comfy.ldm.modules.diffusionmodules.model import (
        AttnBlock,
        Downsample,
        ResnetBlock,
        Upsample,
    )

    plan = Plan(symbols=SYMBOLS)
    forms = {ResnetBlock: "residual", Upsample: "up", Downsample: "down"}
    for name, layer in model.named_modules():
        cls = type(layer)
        last = name.rpartition(".")[2]
        if last in ("conv_in", "conv_out") and isinstance(layer, torch.nn.Conv2d):
            plan.dispatches.append(dispatch_one(Place(name, layer, FORMS["convolution"], True)))
        elif last == "norm_out" and isinstance(layer, torch.nn.GroupNorm):
            plan.dispatches.append(dispatch_one(Place(name, layer, FORMS["norm"], True)))
        if not issubclass(cls, (ResnetBlock, AttnBlock, Upsample, Downsample)):
            continue
        if (problem := _problem(layer)) is not None:
            plan.outside.append((name, problem))
        elif cls in forms:
            plan.dispatches.append(dispatch_one(Place(name, layer, FORMS[forms[cls]], True)))
        elif cls is AttnBlock:
            ends = (
                Place(f"{name}.entry", layer, FORMS["attention_entry"]),
                Place(f"{name}.exit", layer, FORMS["attention_exit"]),
            )
            plan.dispatches.append(dispatch_several(ends, partial(_attend, layer)))
        else:
            plan.outside.append((name, unknown_layer(layer)))
    return plan


def plan_taesd(model: Any) -> Plan:
    from comfy.taesd.taesd import Block

    plan = Plan(symbols=SYMBOLS)
    for name, layer in model.named_modules():
        if type(layer) is Block:
            plan.dispatches.append(dispatch_one(Place(name, layer, FORMS["tiny"])))
    return plan


FAMILY = Family(
    title="VAEs (AutoencoderKL, TAESD)",
    roots={
        "comfy.ldm.models.autoencoder:AutoencoderKL": plan_vae,
        "comfy.ldm.models.autoencoder:AutoencodingEngine": plan_vae,
        "comfy.ldm.models.autoencoder:AutoencodingEngineLegacy": plan_vae,
        "comfy.taesd.taesd:TAESD": plan_taesd,
    },
    forms=FORMS,
)


def _problem(layer: Any) -> Reason | None:
    """Why none of the forms fits an image block."""
    convolutions = [m for m in layer.modules() if isinstance(m, torch.nn.modules.conv._ConvNd)]
    if not convolutions or not all(isinstance(m, torch.nn.Conv2d) for m in convolutions):
        return of("vae_3d")
    if hasattr(layer, "temb_proj"):
        return of("vae_time")
    return None


def _attend(module: Any, calls: Sequence[RegionCall], x: torch.Tensor) -> torch.Tensor | None:
    """Compute an AttnBlock; in between the host attends, with the block's low-memory fallback."""
    enter, leave = calls
    qkv = enter(x)
    if qkv is None:
        return None
    attended = module.optimized_attention(*qkv.chunk(3))
    del qkv
    result: torch.Tensor | None = leave(attended, x)
    if result is None:
        result = FORMS["attention_exit"].computed(module, (attended, x))[0]
    return result
