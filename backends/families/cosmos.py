"""The region plan of the host's Cosmos Predict2 and of Anima, which is made of its blocks.

Regions: blocks, the last layer. Embeddings, the rotation table and Anima's adapter of a text stay
the host's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..contract import InputSpec, Symbol
from . import dit
from .family import Family, Inputs
from .plan import (
    Call,
    Dispatch,
    Form,
    Forward,
    Place,
    Plan,
    dispatch_one,
    host_forward,
    unknown_layer,
)

NAME = "cosmos"

#: Frames of a video and the tokens of one.
SYMBOLS = dit.SYMBOLS | {
    s.name: s for s in (Symbol("frames", 1, 4096, 24), Symbol("patches", 1, 2**16, 1590))
}

_POSITIONS = "called with positions for each block"


class Block(dit.Attending):
    """Block: `x [batch, img, C]`, what modulates `emb [batch, 1, C]`, `context [batch, txt, C']`,
    the rotation table and, where the module has such layers, `adaln [batch, 1, 3 C]` -> as x. In a
    model that computes in float16 x is in float32.
    """

    family = NAME
    name = "block"
    parts = ("self_attn", "cross_attn", "mlp")
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


class VideoBlock(Block):
    """As `Block`, of a model for videos: of 93 frames of 1280x720 two at once have more than 2**31
    elements in the 14B model's.
    """

    name = "video_block"
    widens = True

    def label(self, module: Any) -> str:
        return f"Cosmos video block {module.x_dim}"


class FrameBlock(VideoBlock):
    """As `VideoBlock`, with a timestep for each frame: `x [batch, frames, patches, C]`, what
    modulates `emb [batch, frames, C]` and `adaln [batch, frames, 3 C]`.
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
    """FinalLayer: `x [batch, img, C]`, `emb [batch, 1, C]` and, where the module has such layers,
    `adaln [batch, 1, 3 C]` -> `[batch, img, patch]`.
    """

    family = NAME
    name = "last"

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


BLOCK, VIDEO_BLOCK, FRAME_BLOCK, LAST = Block(), VideoBlock(), FrameBlock(), Last()
FORMS: dict[str, Form] = {form.name: form for form in (BLOCK, VIDEO_BLOCK, FRAME_BLOCK, LAST)}


def plan_cosmos(model: Any) -> Plan:
    """Cut a Cosmos Predict2 into regions; one that takes a mask of frames is for videos."""
    from comfy.ldm.cosmos import predict2 as host

    plan = Plan(symbols=SYMBOLS)
    is_for_videos = model.in_channels > model.out_channels
    for i, block in enumerate(model.blocks):
        name = f"blocks.{i}"
        if type(block) is not host.Block:
            plan.outside.append((name, unknown_layer(block)))
            continue
        places = [Place(name, block, VIDEO_BLOCK if is_for_videos else BLOCK)]
        if is_for_videos:
            places.append(Place(f"{name}:frames", block, FRAME_BLOCK))
        plan.dispatches.append(Dispatch(block, tuple(places), _block))
    last = model.final_layer
    if type(last) is host.FinalLayer:
        plan.dispatches.append(dispatch_one(Place("final_layer", last, LAST), _last))
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


def _problem(options: dict[str, Any], x: torch.Tensor, table: Any, positions: Any) -> str | None:
    """Why a block must run the host's code in this call, or None."""
    if positions is not None:
        return _POSITIONS
    if table is None or table.shape[:3] != (1, x.shape[1:4].numel(), 1):
        return dit.NOT_ROTATED
    return dit.changed(options)


def _block(calls: Sequence[Call], host: Forward) -> Forward:
    plain, *more = calls

    def serve(
        x: torch.Tensor, emb: torch.Tensor, context: Any, table: Any, adaln: Any, options: Any
    ) -> torch.Tensor | None:
        rope, rest = table.flatten(0, 2), () if adaln is None else (adaln,)
        result: torch.Tensor | None
        if emb.shape[1] == 1:
            tokens = x.flatten(1, 3)
            result = dit.serve(plain, None, options, tokens, emb, context, rope, *rest)
        elif more:
            tokens = x.flatten(2, 3)
            rope = rope.reshape(*tokens.shape[1:3], *rope.shape[1:])
            result = dit.serve(more[0], None, options, tokens, emb, context, rope, *rest)
        else:
            result = plain.decline(dit.FRAMES)
        return None if result is None else result.view(x.shape)

    def forward(
        x_B_T_H_W_D: torch.Tensor,  # noqa: N803
        emb_B_T_D: torch.Tensor,  # noqa: N803
        crossattn_emb: torch.Tensor,
        rope_emb_L_1_1_D: Any = None,  # noqa: N803
        adaln_lora_B_T_3D: torch.Tensor | None = None,  # noqa: N803
        extra_per_block_pos_emb: Any = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        options = {} if transformer_options is None else transformer_options
        table, adaln = rope_emb_L_1_1_D, adaln_lora_B_T_3D
        reason = _problem(options, x_B_T_H_W_D, table, extra_per_block_pos_emb)
        result: torch.Tensor | None
        if reason is None:
            result = serve(x_B_T_H_W_D, emb_B_T_D, crossattn_emb, table, adaln, options)
        else:
            result = plain.decline(reason)
        if result is not None:
            return result
        return host()

    return forward


def _last(call: Call, host: Forward) -> Forward:
    def forward(
        x_B_T_H_W_D: torch.Tensor,  # noqa: N803
        emb_B_T_D: torch.Tensor,  # noqa: N803
        adaln_lora_B_T_3D: torch.Tensor | None = None,  # noqa: N803
    ) -> torch.Tensor:
        x, emb, adaln = x_B_T_H_W_D, emb_B_T_D, adaln_lora_B_T_3D
        modulation = (emb,) if adaln is None else (emb, adaln)
        result: torch.Tensor | None
        if emb.shape[1] == 1:
            result = call(x.flatten(1, 3), *modulation)
        else:
            result = call.decline(dit.FRAMES)
        if result is not None:
            return result.view(*x.shape[:4], -1)
        return host()

    return forward
