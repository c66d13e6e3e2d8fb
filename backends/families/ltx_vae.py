"""Regions of the host's LTX video VAEs (LTX-Video 0.9, LTX-2, 2.3).

Regions: residual block, upsampling, last norm with its SiLU. The host decodes pieces of a few
frames: each convolution keeps its last two input frames and prepends them to the next piece. A
region takes those frames and an index of which frames each convolution sees, so one graph serves
first, middle and last pieces and whole videos. Norms are per pixel: they follow the picking of
frames in the same pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..contract import InputSpec, Symbol
from ..kinds.layout import CHANNELS_LAST
from ..plans.binding import OR_NONE, TAKEN, Arguments, Forward
from ..plans.family import Family
from ..plans.pairs import norm_and_activation
from ..plans.plan import Form, Place, Plan, dispatch_one, host_forward, shallow_copy, unknown_layer
from ..reasons import Reason, of
from . import image_vae, ltx_forwards
from .ltx_pieces import (
    FRAMES,
    KEPT,
    Convolution,
    FrameConvolution,
    Given,
    Kept,
    PickedNorm,
    mirrors,
    picked,
)

NAME = "ltx_vae"

SYMBOLS = image_vae.SYMBOLS | {
    s.name: s
    for s in (
        Symbol("frames", 1, 4096, 9),
        # What the convolutions take: what they give has two frames less.
        Symbol("taken_first", 3, 4096, 11),
        Symbol("taken_last", 3, 4096, 11),
        # A border of one pixel is mirrored in another.
        Symbol("mirrored_height", 2, 8192, 136),
        Symbol("mirrored_width", 2, 8192, 120),
    )
}


class Residual(Form):
    """ResnetBlock3D on a piece: the piece, frames kept by its convolutions and its skip path,
    indices -> the result, and what both convolutions keep.
    """

    family = NAME
    name = "residual"
    arguments = Arguments(input_tensor=TAKEN, causal=TAKEN, timestep=OR_NONE)
    layout = CHANNELS_LAST
    children = ("norm1", "conv1", "norm2", "conv2", "non_linearity", "dropout")
    hidden = (
        "scale_shift_table",  # a buffer that its code does not read
        "temporal_cache_state",
        "conv1.temporal_cache_state",
        "conv2.temporal_cache_state",
    )

    def label(self, module: Any) -> str:
        return f"LTX VAE residual {module.in_channels}->{module.out_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        taken, given = module.in_channels, module.out_channels
        sides = _sides(module.conv1)
        specs = [
            InputSpec("x", dtype, ("batch", taken, "frames", *sides)),
            InputSpec("kept_first", dtype, ("batch", taken, KEPT, *sides)),
            InputSpec("kept_last", dtype, ("batch", given, KEPT, *sides)),
            InputSpec("kept_past", dtype, ("batch", given, KEPT, *sides)),
            InputSpec("first", "int64", ("taken_first",)),
            InputSpec("last", "int64", ("taken_last",)),
            InputSpec("past", "int64", ("taken_last",)),
        ]
        if taken != given:
            specs.append(InputSpec("narrowed", dtype, ("batch", given, "frames", *sides)))
        if module.timestep_conditioning:
            specs.append(InputSpec("timestep", dtype, ("batch", 4 * taken, 1, 1, 1)))
        return tuple(specs)

    def reference(self, module: Any, *inputs: Any) -> Any:
        x, kept_first, kept_last, kept_past, first, last, past, *others = inputs
        timestep = others.pop() if module.timestep_conditioning else None
        (around,) = others or (x,)
        ways = (
            FrameConvolution(module.conv1, first, kept_first),
            FrameConvolution(module.conv2, last, kept_last),
        )
        cut = shallow_copy(
            module,
            norm1=PickedNorm(module.norm1, ways[0]),
            conv1=Convolution(ways[0]),
            norm2=PickedNorm(module.norm2, ways[1]),
            conv2=Convolution(ways[1]),
            norm3=torch.nn.Identity(),
            conv_shortcut=Given(picked(torch.cat([kept_past, around], FRAMES), past[KEPT:])),
        )
        cut.temporal_cache_state = Kept()  # type: ignore[assignment]
        result = host_forward(cut, x, timestep=timestep)
        return result, ways[0].keeps, ways[1].keeps


class Up(Form):
    """DepthToSpaceUpsample on a piece, as `Residual` -> all frames, and what it keeps."""

    family = NAME
    name = "up"
    arguments = Arguments(x=TAKEN, causal=TAKEN, timestep=None)
    layout = CHANNELS_LAST
    hidden = ("temporal_cache_state", "conv.temporal_cache_state")

    def label(self, module: Any) -> str:
        return f"LTX VAE upsampling {module.conv.in_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        channels, sides = module.conv.in_channels, _sides(module.conv)
        specs = [
            InputSpec("x", dtype, ("batch", channels, "frames", *sides)),
            InputSpec("kept", dtype, ("batch", channels, KEPT, *sides)),
            InputSpec("taken", "int64", ("taken_first",)),
        ]
        if module.residual:
            specs.append(InputSpec("kept_past", dtype, ("batch", channels, 1, *sides)))
            specs.append(InputSpec("past", "int64", ("taken_first",)))
        return tuple(specs)

    def reference(self, module: Any, *inputs: Any) -> Any:
        x, kept, taken, *others = inputs
        way = FrameConvolution(module.conv, taken, kept)
        past = x
        if module.residual:
            kept_past, index = others
            past = picked(torch.cat([kept_past, x], FRAMES), index[KEPT:])
        cut = shallow_copy(module, conv=Convolution(way, x))
        cut.temporal_cache_state = Kept((None, False, False))  # type: ignore[assignment]
        return host_forward(cut, past), way.keeps


class NormSiLU(Form):
    """A last norm and its SiLU: `x [batch, C, frames, height, width]` -> same. The module holds
    both and the convolution after them.
    """

    family = NAME
    name = "norm_silu"
    layout = CHANNELS_LAST
    children = ("0", "1")

    def label(self, module: Any) -> str:
        return f"LTX VAE last norm {module[2].in_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        dims = ("batch", module[2].in_channels, "frames", "height", "width")
        return (InputSpec("x", dtype, dims),)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return host_forward(module[1], host_forward(module[0], *inputs))


FORMS: dict[str, Form] = {form.name: form for form in (Residual(), Up(), NormSiLU())}


def plan_ltx(model: Any) -> Plan:
    """Cut the decoder. The encoder stays the host's: templates encode single frames, which takes as
    long as calling its blocks does.
    """
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import (
        Decoder,
        DepthToSpaceUpsample,
        ResnetBlock3D,
    )

    plan = Plan(symbols=SYMBOLS)
    picks = ltx_forwards.Picks()
    for name, layer in model.decoder.named_modules(prefix="decoder"):
        cls = type(layer)
        serve: Forward
        if issubclass(cls, (ResnetBlock3D, DepthToSpaceUpsample)):
            if (problem := _problem(layer)) is not None:
                plan.outside.append((name, problem))
            elif cls is ResnetBlock3D:
                place = Place(name, layer, FORMS["residual"])
                serve = partial(ltx_forwards.residual, layer, picks)
                plan.dispatches.append(dispatch_one(place, serve))
            elif cls is DepthToSpaceUpsample:
                place = Place(name, layer, FORMS["up"])
                serve = partial(ltx_forwards.up, layer, picks)
                plan.dispatches.append(dispatch_one(place, serve))
            else:
                plan.outside.append((name, unknown_layer(layer)))
        elif cls is Decoder:
            last = (layer.conv_norm_out, layer.conv_act, layer.conv_out)
            if (problem := _last_problem(layer)) is not None:
                plan.outside.append((f"{name}.conv_norm_out", problem))
                continue
            pair = torch.nn.Sequential(*last)
            place = Place(f"{name}.conv_norm_out", pair, FORMS["norm_silu"])
            plan.dispatches.append(norm_and_activation(place, last[0], last[1]))
    return plan


FAMILY = Family(
    title="VAEs of LTX",
    roots={
        "comfy.ldm.lightricks.vae.causal_video_autoencoder:VideoVAE": plan_ltx,
    },
    forms=FORMS,
)


def _problem(layer: Any) -> Reason | None:
    """Why none of the forms fits a block."""
    from comfy.ldm.lightricks.vae.causal_conv3d import CausalConv3d
    from comfy.ldm.lightricks.vae.pixel_norm import PixelNorm

    parts = dict(layer.named_children())
    norms = [part for name, part in parts.items() if name in ("norm1", "norm2")]
    convolutions = [part for name, part in parts.items() if name in ("conv", "conv1", "conv2")]
    if not all(type(norm) is PixelNorm and norm.dim == 1 for norm in norms):
        return of("vae_norms")
    if not all(type(each) is CausalConv3d and _is_plain(each) for each in convolutions):
        return of("vae_convolutions")
    if getattr(layer, "inject_noise", False):
        return of("vae_noise")
    return None


def _is_plain(convolution: Any) -> bool:
    """Whether a causal convolution takes three frames with a one-pixel border."""
    layer = convolution.conv
    return (
        convolution.time_kernel_size == KEPT + 1
        and convolution.time_stride == 1
        and tuple(layer.kernel_size) == (3, 3, 3)
        and tuple(layer.stride) == tuple(layer.dilation) == (1, 1, 1)
        and tuple(layer.padding) == (0, 1, 1)
        and layer.padding_mode in ("zeros", "reflect")
    )


def _last_problem(half: Any) -> Reason | None:
    """Why a decoder's last norm and SiLU are not called one after the other."""
    from comfy.ldm.lightricks.vae.pixel_norm import PixelNorm

    norm, act = half.conv_norm_out, half.conv_act
    if type(norm) is not PixelNorm or norm.dim != 1 or type(act) is not torch.nn.SiLU:
        return of("vae_norms")
    if getattr(half, "timestep_conditioning", False):
        return of("vae_last_norm")
    return None


def _sides(convolution: Any) -> tuple[str, str]:
    return ("mirrored_height", "mirrored_width") if mirrors(convolution) else ("height", "width")
