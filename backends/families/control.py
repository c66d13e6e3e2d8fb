"""Regions of the host's ControlNet: SD1.5, SD2, SDXL, its union variant, ControlLoRA.

The encoder consists of the UNet's blocks and shares their forms, so it runs on the graphs of the
UNet that it controls. The block that reads the hint is its own. Zero convolutions and embeddings
stay the host's: a graph of one convolution gains nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from ..contract import InputSpec, Symbol
from ..plans.binding import Arguments
from ..plans.family import Family
from ..plans.plan import Form, Place, Plan, dispatch_one, host_forward
from . import unet

NAME = "control"

SYMBOLS = unet.SYMBOLS | {
    s.name: s for s in (Symbol("hint_height", 1, 8192, 576), Symbol("hint_width", 1, 8192, 448))
}


class Hint(Form):
    """input_hint_block: `hint [batch, C, hint_height, hint_width]` -> an eighth of each side."""

    family = NAME
    name = "hint"
    arguments = Arguments("hint", emb=None, context=None)  # its layers read nothing else

    def label(self, module: Any) -> str:
        return f"Hint block {module[0].in_channels}->{module[-1].out_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        dims = ("batch", module[0].in_channels, "hint_height", "hint_width")
        return (InputSpec("hint", dtype, dims),)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return host_forward(module, inputs[0], None, None, {})


HINT = Hint()
FORMS: dict[str, Form] = {HINT.name: HINT}


def plan_control(model: Any) -> Plan:
    plan = Plan(symbols=SYMBOLS)
    hint = Place("input_hint_block", model.input_hint_block, HINT)
    plan.dispatches.append(dispatch_one(hint))
    for name, layer in unet.encoder_layers(model):
        unet.plan_layer(plan, name, layer)
    return plan


def _has_one_control(model: Any) -> bool:
    """A union copies its control type to the GPU in each call."""
    return getattr(model, "control_add_embedding", None) is None


FAMILY = Family(
    title="ControlNets for UNets",
    roots={"comfy.cldm.cldm:ControlNet": plan_control},
    forms=FORMS,
    may_be_captured=_has_one_control,
)
