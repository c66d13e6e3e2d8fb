"""Regions of the host's Cosmos Predict2, and of Anima, which uses its blocks: blocks, last layer.

Embeddings, the rotation table and Anima's text adapter stay the host's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..contract import InputSpec, Symbol
from ..plans.binding import OR_NONE, TAKEN, Arguments, Forward, needed
from ..plans.family import Family, Inputs
from ..plans.plan import (
    Form,
    Place,
    Plan,
    RegionCall,
    dispatch_one,
    dispatch_several,
    host_forward,
    unknown_layer,
)
from ..reasons import of
from . import dit

NAME = "cosmos"

#: Frames of a video and the tokens of one.
SYMBOLS = dit.SYMBOLS | {
    s.name: s for s in (Symbol("frames", 1, 4096, 24), Symbol("patches", 1, 2**16, 1590))
}

_POSITIONS = of("positions")


class Block(dit.Attending):
    """Block: `x [batch, img, C]` (float32 if the model computes in float16), modulation `emb
    [batch, 1, C]`, `context [batch, txt, C']`, rotation table, optional `adaln [batch, 1, 3 C]` ->
    as x.
    """

    family = NAME
    name = "block"
    parts = ("self_attn", "cross_attn", "mlp")
    arguments = dit.takes(
        x_B_T_H_W_D=TAKEN,
        emb_B_T_D=TAKEN,
        crossattn_emb=TAKEN,
        rope_emb_L_1_1_D=needed(dit.NOT_ROTATED),
        adaln_lora_B_T_3D=OR_NONE,
        extra_per_block_pos_emb=_POSITIONS,
    )
    #: The sides of its tokens, and that of what modulates them.
    tokens: tuple[str, ...] = ("img",)
    times: int | str = 1

    def label(self, module: Any) -> str:
        return f"Cosmos block {module.x_dim}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        width, attention = module.x_dim, module.self_attn
        between = "float32" if dtype == "float16" else dtype
        table = (*self.tokens, attention.head_dim // 2, 2, 2)
        return (
            InputSpec("x", between, ("batch", *self.tokens, width)),
            InputSpec("emb", dtype, ("batch", self.times, width)),
            InputSpec("context", dtype, ("batch", "txt", module.cross_attn.context_dim)),
            InputSpec("rope", "float32", table),
            *_adaln(module, self.times, width, dtype),
        )

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, emb, context, rope, *adaln = inputs
        result = host_forward(
            module,
            x[:, None, :, None],
            emb,
            context,
            rope[None, :, None],
            *adaln,
            transformer_options=dit.options(),
        )
        return result.flatten(1, 3)


class FrameBlock(Block):
    """As `Block`, with a timestep per frame: `x [batch, frames, patches, C]`, `emb [batch, frames,
    C]`, `adaln [batch, frames, 3 C]`.
    """

    name = "frame_block"
    tokens = ("frames", "patches")
    times = "frames"

    def label(self, module: Any) -> str:
        return f"Cosmos block of timed frames {module.x_dim}"

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, emb, context, rope, *adaln = inputs
        result = host_forward(
            module,
            x.unsqueeze(3),
            emb,
            context,
            rope.flatten(0, 1)[None, :, None],
            *adaln,
            transformer_options=dit.options(),
        )
        return result.squeeze(3)


class Last(Form):
    """FinalLayer: `x [batch, img, C]`, `emb [batch, 1, C]`, optional `adaln` -> `[batch, img,
    patch]`.
    """

    family = NAME
    name = "last"
    arguments = Arguments(x_B_T_H_W_D=TAKEN, emb_B_T_D=TAKEN, adaln_lora_B_T_3D=OR_NONE)

    def label(self, module: Any) -> str:
        return f"Cosmos last layer {module.hidden_size}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        width = module.hidden_size
        return (
            InputSpec("x", dtype, ("batch", "img", width)),
            InputSpec("emb", dtype, ("batch", 1, width)),
            *_adaln(module, 1, width, dtype),
        )

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, *modulation = inputs
        return host_forward(module, x[:, None, :, None], *modulation).flatten(1, 3)

    def serving(self, call: RegionCall, module: Any) -> Forward:
        def serve(x: torch.Tensor, emb: torch.Tensor, adaln: Any) -> torch.Tensor | None:
            if emb.shape[1] != 1:
                call.decline(dit.FRAMES)
                return None
            result = call(x.flatten(1, 3), emb, *(() if adaln is None else (adaln,)))
            return None if result is None else result.view(*x.shape[:4], -1)

        return serve


BLOCK, FRAME_BLOCK, LAST = Block(), FrameBlock(), Last()
FORMS: dict[str, Form] = {form.name: form for form in (BLOCK, FRAME_BLOCK, LAST)}


def plan_cosmos(model: Any) -> Plan:
    """Cut a Cosmos Predict2. One with a frame mask is for videos: two of 93 frames at 1280x720
    exceed 2**31 elements in the 14B model's blocks.
    """
    from comfy.ldm.cosmos import predict2 as host

    plan = Plan(symbols=SYMBOLS)
    is_for_videos = model.in_channels > model.out_channels
    for i, block in enumerate(model.blocks):
        name = f"blocks.{i}"
        if type(block) is not host.Block:
            plan.outside.append((name, unknown_layer(block)))
            continue
        places = [Place(name, block, BLOCK, is_for_videos)]
        if is_for_videos:
            places.append(Place(f"{name}:frames", block, FRAME_BLOCK, is_for_videos))
        plan.dispatches.append(dispatch_several(places, _serve))
    last = model.final_layer
    if type(last) is host.FinalLayer:
        plan.dispatches.append(dispatch_one(Place("final_layer", last, LAST)))
    return plan


def _empty(model: Any, _: Mapping[str, Any], latent: tuple[int, ...]) -> Inputs:
    rows, channels, *sides = latent
    given: Inputs = {"c_crossattn": (rows, 512, model.blocks[0].cross_attn.context_dim)}
    if more := model.in_channels - channels:  # the mask of the frames that are given
        given["c_concat"] = (rows, more, *sides)
    return given


FAMILY = Family(
    title="Cosmos Predict2, Anima",
    roots={
        "comfy.ldm.cosmos.predict2:MiniTrainDIT": plan_cosmos,
        "comfy.ldm.anima.model:Anima": plan_cosmos,
    },
    forms=FORMS,
    may_be_captured=dit.calls_of("MiniTrainDIT", "Anima"),
    unread=dit.UNREAD_OPTIONS,
    guided_together=True,
    empty=_empty,
)


def _adaln(module: Any, times: int | str, width: int, dtype: str) -> tuple[InputSpec, ...]:
    if not module.use_adaln_lora:
        return ()
    return (InputSpec("adaln", dtype, ("batch", times, 3 * width)),)


def _serve(
    calls: Sequence[RegionCall],
    options: dit.Options,
    x: torch.Tensor,
    emb: torch.Tensor,
    context: Any,
    table: torch.Tensor,
    adaln: torch.Tensor | None,
) -> Any:
    """Compute a block of one timestep, or of one per frame."""
    plain, *more = calls
    reason = dit.changed(options)
    if table.shape[:3] != (1, x.shape[1:4].numel(), 1):
        reason = dit.NOT_ROTATED
    elif emb.shape[1] != 1 and not more:
        reason = dit.FRAMES
    if reason is not None:
        return plain.decline(reason)
    rope, rest = table.flatten(0, 2), () if adaln is None else (adaln,)
    if emb.shape[1] == 1:
        call, tokens = plain, x.flatten(1, 3)
    else:
        call, tokens = more[0], x.flatten(2, 3)
        rope = rope.reshape(*tokens.shape[1:3], *rope.shape[1:])
    result = dit.serve(call, None, options, tokens, emb, context, rope, *rest)
    return None if result is None else result.view(x.shape)
