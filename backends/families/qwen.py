"""Regions of the host's Qwen-Image, its Edit and Layered models, and their ControlNets: blocks,
last norm.

Embeddings, the rotation table and the last product stay the host's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..contract import InputSpec, Symbol
from ..plans.binding import OR_NONE, TAKEN
from ..plans.family import Family, Inputs
from ..plans.plan import (
    Form,
    Place,
    Plan,
    RegionCall,
    dispatch_several,
    host_results,
    unknown_layer,
)
from . import dit

NAME = "qwen"

SYMBOLS = dit.SYMBOLS | {"ref": Symbol("ref", 1, 2**17, 4104)}


class Block(dit.Attending):
    """QwenImageTransformerBlock: `img [batch, img, C]`, `txt [batch, txt, C]`, modulation `temb
    [batch, C]`, the rotation table in two parts -> `(txt, img)`.
    """

    family = NAME
    name = "block"
    parts = ("img_mlp", "txt_mlp")
    arguments = dit.takes(
        hidden_states=TAKEN,
        encoder_hidden_states=TAKEN,
        encoder_hidden_states_mask=dit.MASKED,
        temb=TAKEN,
        image_rotary_emb=OR_NONE,
        timestep_zero_index=OR_NONE,
    )

    def label(self, module: Any) -> str:
        return f"Qwen block {module.dim}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (
            _stream("img", module, dtype),
            _stream("txt", module, dtype),
            InputSpec("temb", dtype, ("batch", module.dim)),
            _table("pe_txt", "txt", module, dtype),
            _table("pe_img", "img", module, dtype),
        )

    def reference(self, module: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        img, txt, temb, pe_txt, pe_img = inputs
        pe = torch.cat((pe_txt, pe_img), 2)
        return host_results(module, img, txt, None, temb, pe, transformer_options=dit.options())


class ControlBlock(Block):
    """As `Block`, with two more layers that its network calls by themselves."""

    name = "control_block"
    children = (
        *("img_mod", "img_norm1", "img_norm2", "img_mlp"),
        *("txt_mod", "txt_norm1", "txt_norm2", "txt_mlp", "attn"),
    )
    hidden = ("has_before_proj",)


class BlockWithReferences(dit.Attending):
    """As `Block`, with reference tokens of their own timestep: `ref [batch, ref, C]`, modulated by
    `temb_ref`, and at the end of the `img` result.
    """

    family = NAME
    name = "block_with_references"
    parts = ("img_mlp", "txt_mlp")

    def label(self, module: Any) -> str:
        return f"Qwen block with references {module.dim}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (
            _stream("img", module, dtype),
            _stream("ref", module, dtype),
            _stream("txt", module, dtype),
            InputSpec("temb", dtype, ("batch", module.dim)),
            InputSpec("temb_ref", dtype, ("batch", module.dim)),
            _table("pe_txt", "txt", module, dtype),
            _table("pe_img", "img", module, dtype),
            _table("pe_ref", "ref", module, dtype),
        )

    def reference(self, module: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        img, ref, txt, temb, temb_ref, *tables = inputs
        with _Halves():
            return host_results(
                module,
                torch.cat((img, ref), 1),
                txt,
                None,
                torch.cat((temb, temb_ref)),
                torch.cat(tables, 2),
                img.shape[1],
                transformer_options=dit.options(),
            )


BLOCK, REFERENCED, CONTROL = Block(), BlockWithReferences(), ControlBlock()
LAST = dit.LastLayer(NAME, "Qwen")
FORMS: dict[str, Form] = {form.name: form for form in (BLOCK, REFERENCED, LAST, CONTROL)}


def plan_qwen(model: Any) -> Plan:
    from comfy.ldm.qwen_image import model as host

    plan = Plan(symbols=SYMBOLS)
    # What other files' references are treated as, too, where a node asks for it; they run eager.
    timed = model.default_ref_method == "index_timestep_zero"
    for i, block in enumerate(model.transformer_blocks):
        name = f"transformer_blocks.{i}"
        if type(block) is not host.QwenImageTransformerBlock:
            plan.outside.append((name, unknown_layer(block)))
            continue
        places = [Place(name, block, BLOCK)]
        if timed:
            places.append(Place(f"{name}:references", block, REFERENCED))
        plan.dispatches.append(dispatch_several(places, _serve))
    dit.cut_last(plan, model, "norm_out", host.LastLayer, LAST)
    return plan


def plan_fun_control(model: Any) -> Plan:
    """Cut a Fun ControlNet's blocks; it calls its model's embeddings."""
    from comfy.ldm.qwen_image import controlnet as host

    plan = Plan(symbols=SYMBOLS)
    for i, block in enumerate(model.control_blocks):
        name = f"control_blocks.{i}"
        if type(block) is host.QwenImageFunControlBlock:
            plan.dispatches.append(dispatch_several([Place(name, block, CONTROL)], _serve))
        else:
            plan.outside.append((name, unknown_layer(block)))
    return plan


def _empty(model: Any, _: Mapping[str, Any], latent: tuple[int, ...]) -> Inputs:
    return {"c_crossattn": (latent[0], 64, model.txt_in.in_features)}


FAMILY = Family(
    title="Qwen-Image",
    roots={
        "comfy.ldm.qwen_image.model:QwenImageTransformer2DModel": plan_qwen,
        "comfy.ldm.qwen_image.controlnet:QwenImageControlNetModel": plan_qwen,
        "comfy.ldm.qwen_image.controlnet:QwenImageFunControlNetModel": plan_fun_control,
    },
    forms=FORMS,
    may_be_captured=dit.calls_of("QwenImageTransformer2DModel"),
    unread=dit.UNREAD_OPTIONS,
    empty=_empty,
)


class _Halves(TorchFunctionMode):
    """`chunk(2, dim=0)` as two halves: torch's own fixes the batch, counting the pieces."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.Tensor.chunk and args[1:] == (2,) and given == {"dim": 0}:
            both = args[0]
            half = both.shape[0] // 2
            return both.narrow(0, 0, half), both.narrow(0, half, half)
        return func(*args, **given)


def _stream(name: str, module: Any, dtype: str) -> InputSpec:
    return InputSpec(name, dtype, ("batch", name, module.dim))


def _table(name: str, tokens: str, module: Any, dtype: str) -> InputSpec:
    """A rotation table, computed by the host once a step in the compute dtype."""
    half = module.attention_head_dim // 2
    return InputSpec(name, dtype, ("batch", 1, tokens, half, 2, 2))


def _serve(
    calls: Sequence[RegionCall],
    options: dit.Options,
    img: torch.Tensor,
    txt: torch.Tensor,
    temb: torch.Tensor,
    pe: Any,
    begin: int | None,
) -> Any:
    """Compute a block; reference tokens with their own timestep `begin` there."""
    plain, *more = calls
    reason = dit.changed(options)
    if not isinstance(pe, torch.Tensor) or pe.dim() != 6:
        reason = dit.NOT_ROTATED
    elif begin is not None and not more:
        reason = dit.REFERENCES
    if reason is not None:
        return plain.decline(reason)
    if begin is None:
        parts = dit.split(pe, 2, txt.shape[1])
        return dit.serve(plain, None, options, img, txt, temb, *parts)
    parts = dit.split(pe, 2, txt.shape[1], begin)
    streams = dit.split(img, 1, begin)
    return dit.serve(more[0], None, options, *streams, txt, *temb.chunk(2), *parts)
