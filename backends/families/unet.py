"""Regions of the host's UNetModel: SD1.5, SD2, SDXL, its refiner and inpainting variants.

Regions: residual block, transformer block, entry and exit of a spatial transformer, down- and
upsampling, output head. Time and label embeddings and the first convolution stay the host's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ..code.packs import is_made_of_the_hosts, owner_of
from ..code.purity import options_kept
from ..contract import InputSpec, Symbol
from ..host_api.options import UNREAD
from ..kinds.layout import CHANNELS_LAST
from ..plans.binding import OR_NONE, TAKEN, Arguments, Forward, needed
from ..plans.family import Family, Inputs
from ..plans.plan import (
    Form,
    Passage,
    Place,
    Plan,
    RegionCall,
    dispatch_one,
    dispatch_several,
    host_forward,
    unknown_layer,
)
from ..reasons import Reason, of
from . import dit
from .spatial import ARGUMENTS, ENTRY, EXIT, serve_spatial, spatial_transformer_change

NAME = "unet"

#: Patches that act inside a transformer block; any of them sends the block to the host's code.
BLOCK_PATCHES = (
    "attn1_patch",
    "attn1_output_patch",
    "middle_patch",
    "attn2_patch",
    "attn2_output_patch",
)

SYMBOLS = {
    s.name: s
    for s in (
        Symbol("batch", 1, 64, 2),
        Symbol("height", 1, 1024, 72),
        Symbol("width", 1, 1024, 56),
        Symbol("out_height", 1, 1024, 143),
        Symbol("out_width", 1, 1024, 111),
        Symbol("tokens", 1, 1024 * 1024, 4032),
        Symbol("context", 1, 4096, 77),
    )
}


class Residual(Form):
    """ResBlock: `(x [batch, C, height, width], emb [batch, E])` -> `[batch, C', height, width]`."""

    family = NAME
    name = "residual"
    arguments = Arguments(x=TAKEN, emb=TAKEN)
    layout = CHANNELS_LAST

    def label(self, module: Any) -> str:
        return f"ResBlock {module.channels}->{module.out_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (
            InputSpec("x", dtype, ("batch", module.channels, "height", "width")),
            InputSpec("emb", dtype, ("batch", module.emb_channels)),
        )


class Block(dit.Attending):
    """BasicTransformerBlock: `(x [batch, tokens, C], context [batch, context, D])` -> as x."""

    family = NAME
    name = "block"
    parts = ("attn1", "attn2", "ff")
    arguments = dit.takes(x=TAKEN, context=needed(of("no_context")))

    def label(self, module: Any) -> str:
        return f"Transformer block {module.norm1.normalized_shape[0]}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        width = module.norm1.normalized_shape[0]
        context = module.attn2.to_k.weight.shape[1]
        return (
            InputSpec("x", dtype, ("batch", "tokens", width)),
            InputSpec("context", dtype, ("batch", "context", context)),
        )

    def handed_on(self, module: Any) -> dict[str, tuple[str, ...]]:
        return {"context": ("attn1", "attn2") if module.disable_self_attn else ("attn2",)}

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, context = inputs
        return host_forward(module, x, context=context, transformer_options=dit.options())

    def serving(self, call: RegionCall, module: Any) -> Forward:
        # By another pack's forward, if it has one.
        kept = options_kept(type(module).forward)

        def serve(options: dit.Options, x: torch.Tensor, context: torch.Tensor) -> Any:
            options = {} if options is None else options
            result = dit.serve(call, patched(options) if options else None, options, x, context)
            if result is not None:
                for owner, name in kept:
                    setattr(owner, name, options)
            return result

        return serve


class Down(Form):
    """Downsample: `x [batch, C, height, width]` -> half of each side, rounded up."""

    family = NAME
    name = "down"
    layout = CHANNELS_LAST

    def label(self, module: Any) -> str:
        return f"Downsample {module.channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("batch", module.channels, "height", "width")),)


class Up(Form):
    """Upsample: `(x [batch, C, height, width], out_height, out_width)` -> `[batch, C', *out]`: the
    size of the skip connection, as 45 rows come from 23.
    """

    family = NAME
    name = "up"
    arguments = Arguments(x=TAKEN, output_shape=OR_NONE)
    layout = CHANNELS_LAST

    def label(self, module: Any) -> str:
        return f"Upsample {module.channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (
            InputSpec("x", dtype, ("batch", module.channels, "height", "width")),
            InputSpec("out_height", "int", ("out_height",)),
            InputSpec("out_width", "int", ("out_width",)),
        )

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, height, width = inputs
        return host_forward(module, x, (x.shape[0], x.shape[1], height, width))

    def serving(self, call: RegionCall, module: Any) -> Forward:
        def serve(x: torch.Tensor, output_shape: Any) -> Any:
            size = [2 * s for s in x.shape[2:]] if output_shape is None else output_shape[2:]
            return call(x, int(size[0]), int(size[1]))

        return serve


class Head(Form):
    """The output Sequential: `x [batch, C, height, width]` -> the latent's channels."""

    family = NAME
    name = "head"
    layout = CHANNELS_LAST

    def label(self, module: Any) -> str:
        return f"Output head {module[0].num_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("batch", module[0].num_channels, "height", "width")),)


FORMS: dict[str, Form] = {
    "residual": Residual(),
    "block": Block(),
    "entry": ENTRY,
    "exit": EXIT,
    "down": Down(),
    "up": Up(),
    "head": Head(),
}


def plan_unet(model: Any) -> Plan:
    """Cut an instance of exactly the host's `UNetModel`."""
    plan = Plan(symbols=SYMBOLS)
    for name, layer in encoder_layers(model):
        plan_layer(plan, name, layer)
    for i, sequence in enumerate(model.output_blocks):
        for j, layer in enumerate(sequence):
            plan_layer(plan, f"output_blocks.{i}.{j}", layer)
    head = getattr(model, "out", None)
    if type(head) is torch.nn.Sequential and len(head) and hasattr(head[0], "num_channels"):
        plan.dispatches.append(dispatch_one(Place("out", head, FORMS["head"])))
    else:
        plan.outside.append(("out", unknown_layer(head)))
    return plan


def _empty(_: Any, settings: Mapping[str, Any], latent: tuple[int, ...]) -> Inputs:
    rows, channels, *sides = latent
    given: Inputs = {"c_crossattn": (rows, 77, settings["context_dim"])}
    if settings.get("adm_in_channels"):
        given["y"] = (rows, settings["adm_in_channels"])
    if more := settings["in_channels"] - channels:  # inpainting: mask and masked image
        given["c_concat"] = (rows, more, *sides)
    return given


FAMILY = Family(
    title="UNets (SD1.5, SD2, SDXL, SVD)",
    roots={"comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel": plan_unet},
    forms=FORMS,
    may_be_captured=lambda _: True,
    unread=UNREAD | {"cond_or_uncond", "sample_sigmas", "sigmas"},
    guided_together=True,
    empty=_empty,
)


def patched(options: dict[str, Any]) -> Reason | None:
    """Return why `transformer_options` send a transformer block to the host's code, or None."""
    patches = options.get("patches")
    if patches:
        for name in BLOCK_PATCHES:
            if name in patches:
                return of("patches", name=name)
    replaced = options.get("patches_replace")
    if replaced:
        block = options.get("block")
        place = (*block, options.get("block_index", 0)) if block is not None else None
        for name in ("attn1", "attn2"):
            table = replaced.get(name)
            if table and (place in table or block in table):
                return of("replaces", name=name)
    return None


def encoder_layers(model: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (name, layer) of a UNet's encoder and middle, which a ControlNet has too."""
    for i, sequence in enumerate(model.input_blocks):
        for j, layer in enumerate(sequence):
            yield f"input_blocks.{i}.{j}", layer
    for j, layer in enumerate(model.middle_block or ()):
        yield f"middle_block.{j}", layer


def plan_layer(plan: Plan, name: str, layer: Any) -> None:
    """Add one layer of a UNet's blocks to a plan, or why it stays the host's."""
    from comfy.ldm.modules.attention import BasicTransformerBlock, SpatialTransformer
    from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, ResBlock, Upsample

    cls = type(layer)
    if isinstance(layer, Passage):
        return
    if cls is ResBlock and not layer.skip_t_emb:
        plan.dispatches.append(dispatch_one(Place(name, layer, FORMS["residual"])))
    elif cls is Upsample and layer.dims == 2:
        plan.dispatches.append(dispatch_one(Place(name, layer, FORMS["up"])))
    elif cls is Downsample and layer.dims == 2:
        plan.dispatches.append(dispatch_one(Place(name, layer, FORMS["down"])))
    elif cls is SpatialTransformer:
        if (change := spatial_transformer_change()) is None:
            ends = (
                Place(f"{name}.entry", layer, FORMS["entry"]),
                Place(f"{name}.exit", layer, FORMS["exit"]),
            )
            serve = partial(serve_spatial, layer)
            plan.dispatches.append(dispatch_several(ends, serve, ARGUMENTS))
        else:
            plan.outside += [(f"{name}.entry", change), (f"{name}.exit", change)]
        for i, block in enumerate(layer.transformer_blocks):
            where = f"{name}.transformer_blocks.{i}"
            if type(block) is BasicTransformerBlock and block.attn2 is not None and not block.ff_in:
                plan.dispatches.append(dispatch_one(Place(where, block, FORMS["block"])))
            else:
                plan.outside.append((where, unknown_layer(block)))
    elif not is_made_of_the_hosts(cls):
        plan.guests.append((name, f"{cls.__qualname__} of {owner_of(cls)}"))
    elif name != "input_blocks.0.0":
        plan.outside.append((name, unknown_layer(layer)))
