"""Regions of the host's SD3, SD3.5 and their ControlNets.

Regions: two-stream blocks, the last layer, and the one-stream blocks of SD3.5's ControlNets.
Embeddings and the modulation vector stay the host's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..contract import InputSpec
from ..plans.binding import TAKEN, Arguments
from ..plans.family import Family, Inputs
from ..plans.plan import Form, Plan, RegionCall, host_results
from . import dit

NAME = "sd3"


class Joint(dit.Attending):
    """JointBlock: `txt [batch, txt, C]`, `img [batch, img, C]`, modulation `c [batch, C]` -> `(txt,
    img)`; a model's last one returns img alone.
    """

    family = NAME
    name = "joint"
    parts = ("context_block.mlp", "x_block.mlp")
    arguments = dit.takes(context=TAKEN, x=TAKEN, c=TAKEN, use_checkpoint=None)

    def label(self, module: Any) -> str:
        return f"SD3 block {_width(module.x_block)}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        width = _width(module.x_block)
        return (
            InputSpec("txt", dtype, ("batch", "txt", width)),
            InputSpec("img", dtype, ("batch", "img", width)),
            InputSpec("c", dtype, ("batch", width)),
        )

    def reference(self, module: Any, *inputs: Any) -> Any:
        txt, img, c = inputs
        results = host_results(
            module, txt, img, c=c, use_checkpoint=False, transformer_options=dit.options()
        )
        return results[1] if module.context_block.pre_only else results

    def serve(self, call: RegionCall, options: dit.Options, *inputs: Any) -> Any:
        # The host's code asks for no patches within blocks.
        results = dit.serve(call, None, options, *inputs)
        return (None, results) if isinstance(results, torch.Tensor) else results


class Single(Form):
    """DismantledBlock by itself: `x [batch, img, C]`, modulation `c [batch, C]` -> as x."""

    family = NAME
    name = "single"
    arguments = Arguments(x=TAKEN, c=TAKEN)

    def label(self, module: Any) -> str:
        return f"SD3 control block {_width(module)}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return dit.modulated("c", _width(module), dtype)


JOINT, SINGLE, LAST = Joint(), Single(), dit.LastLayer(NAME, "SD3")
FORMS: dict[str, Form] = {form.name: form for form in (JOINT, SINGLE, LAST)}


def plan_sd3(model: Any) -> Plan:
    """Cut an SD3, or a ControlNet made like it."""
    from comfy.ldm.modules.diffusionmodules import mmdit as host

    plan = Plan(symbols=dit.SYMBOLS)
    dit.cut_stack(plan, model, "joint_blocks", host.JointBlock, JOINT)
    dit.cut_last(plan, model, "final_layer", host.FinalLayer, LAST)
    return plan


def plan_embedder(model: Any) -> Plan:
    """Cut a ControlNet of SD3.5, which takes no text."""
    from comfy.ldm.modules.diffusionmodules import mmdit as host

    plan = Plan(symbols=dit.SYMBOLS)
    dit.cut_stack(plan, model, "transformer_blocks", host.DismantledBlock, SINGLE)
    return plan


def _empty(model: Any, _: Mapping[str, Any], latent: tuple[int, ...]) -> Inputs:
    width = getattr(model.context_embedder, "in_features", model.hidden_size)
    given: Inputs = {"c_crossattn": (latent[0], 154, width)}  # CLIP's 77 tokens, and T5's
    if model.y_embedder is not None:
        given["y"] = (latent[0], model.y_embedder.mlp[0].in_features)
    return given


FAMILY = Family(
    title="SD3, SD3.5",
    roots={
        "comfy.ldm.modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper": plan_sd3,
        "comfy.cldm.mmdit:ControlNet": plan_sd3,
        "comfy.cldm.dit_embedder:ControlNetEmbedder": plan_embedder,
    },
    forms=FORMS,
    may_be_captured=dit.calls_of("OpenAISignatureMMDITWrapper"),
    unread=dit.UNREAD_OPTIONS,
    guided_together=True,
    empty=_empty,
)


def _width(block: Any) -> int:
    return int(block.attn.num_heads * block.attn.head_dim)
