"""Regions of the host's Wan 2.1 and 2.2: its blocks and the head.

Embeddings, the rotation table and layers that variants (Vace, Camera, Animate, SCAIL, S2V, HuMo,
WanDancer) add around the blocks stay the host's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..contract import Symbol
from ..plans.family import Family, Inputs
from ..plans.plan import Form, Place, Plan, dispatch_one, dispatch_several, unknown_layer
from . import dit
from .wan_animate import FORMS as ANIMATE2
from .wan_animate import plan_animate2
from .wan_blocks import BLOCK, FRAME_BLOCK, HEAD, IMAGE_BLOCK, cut_heads, serve_block
from .wan_variants import HINT_BLOCK, SOUND_BLOCK

#: Tokens of a CLIP's image: 257, or 514 for a first and a last frame. Frames and the tokens of one.
SYMBOLS = dit.SYMBOLS | {
    s.name: s
    for s in (
        Symbol("clip", 1, 4096, 257),
        Symbol("frames", 1, 4096, 21),
        Symbol("patches", 1, 2**16, 880),
    )
}

#: Channels out of the one plain model (2.2 5B) that may give each frame a timestep of its own.
_TIMES_FRAMES = 48

FORMS: dict[str, Form] = {
    form.name: form for form in (BLOCK, IMAGE_BLOCK, FRAME_BLOCK, HINT_BLOCK, SOUND_BLOCK, HEAD)
} | ANIMATE2


def plan_wan(model: Any) -> Plan:
    from comfy.ldm.wan import model as host

    plan = Plan(symbols=SYMBOLS)
    for i, block in enumerate(model.blocks):
        name = f"blocks.{i}"
        if type(block) is host.WanAttentionBlockAudio:
            plan.dispatches.append(dispatch_one(Place(name, block, SOUND_BLOCK, True)))
        elif type(block) is not host.WanAttentionBlock:
            plan.outside.append((name, unknown_layer(block)))
        elif type(block.cross_attn) is host.WanI2VCrossAttention:
            plan.dispatches.append(dispatch_one(Place(name, block, IMAGE_BLOCK, True)))
        elif type(model) is host.WanModel_S2V:
            # The video has one timestep and what is put behind it another.
            place = Place(f"{name}:frames", block, FRAME_BLOCK, True)
            plan.dispatches.append(dispatch_one(place))
        else:
            places = [Place(name, block, BLOCK, True)]
            if model.out_dim == _TIMES_FRAMES:
                places.append(Place(f"{name}:frames", block, FRAME_BLOCK, True))
            plan.dispatches.append(dispatch_several(places, serve_block))
    for i, block in enumerate(getattr(model, "vace_blocks", ())):
        name = f"vace_blocks.{i}"
        if type(block) is host.VaceWanAttentionBlock:
            plan.dispatches.append(dispatch_one(Place(name, block, HINT_BLOCK, True)))
        else:
            plan.outside.append((name, unknown_layer(block)))
    cut_heads(plan, model)
    return plan


def _empty(model: Any, _: Mapping[str, Any], latent: tuple[int, ...]) -> Inputs | None:
    rows, channels, *sides = latent
    if type(model).__name__ != "WanModel":
        return None  # its variants look at more than a text
    given: Inputs = {"c_crossattn": (rows, 512, model.text_embedding[0].in_features)}
    if more := model.in_dim - channels:  # image to video: the image and its mask
        given["c_concat"] = (rows, more, *sides)
    if model.img_emb is not None:
        given["clip_fea"] = (rows, 257, 1280)
    return given


FAMILY = Family(
    title="Wan",
    roots={
        f"comfy.ldm.wan.{name}": plan_wan
        for name in (
            *("model:WanModel", "model:VaceWanModel", "model:CameraWanModel"),
            *("model:WanModel_S2V", "model:SCAILWanModel", "model:SCAIL2WanModel"),
            *("model_animate:AnimateWanModel", "model:HumoWanModel"),
            "model_wandancer:WanDancerModel",
        )
    }
    | {"comfy.ldm.wan.model_animate2:WanAnimate2Model": partial(plan_animate2, SYMBOLS)},
    forms=FORMS,
    may_be_captured=dit.calls_of("WanModel"),
    unread=dit.UNREAD_OPTIONS,
    guided_together=True,
    empty=_empty,
)
