"""Regions of the host's T2I-Adapter for SD1.5 and SDXL: its residual blocks.

Downsampling stays the host's (it pads by each size's parity), as do the first convolution and the
unshuffling.
"""

from __future__ import annotations

from typing import Any

import torch

from ..contract import InputSpec
from ..plans.binding import Forward
from ..plans.family import Family
from ..plans.plan import Form, Place, Plan, RegionCall, dispatch_one, host_forward, shallow_copy
from . import unet

NAME = "adapter"


class Block(Form):
    """ResnetBlock behind its downsampling: `x [batch, C, height, width]` -> `C'` of that size."""

    family = NAME
    name = "block"
    children: tuple[str, ...] | None = ("in_conv", "block1", "act", "block2", "skep")

    def serving(self, call: RegionCall, module: Any) -> Forward:
        return lambda x: call(module.down_opt(x) if module.down else x)

    def label(self, module: Any) -> str:
        return f"Adapter block {_first(module).in_channels}->{module.block2.out_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("batch", _first(module).in_channels, "height", "width")),)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return host_forward(shallow_copy(module, down_opt=torch.nn.Identity()), *inputs)


BLOCK = Block()
FORMS: dict[str, Form] = {BLOCK.name: BLOCK}


def plan_adapter(model: Any) -> Plan:
    plan = Plan(symbols=unet.SYMBOLS)
    for i, block in enumerate(model.body):
        plan.dispatches.append(dispatch_one(Place(f"body.{i}", block, BLOCK)))
    return plan


FAMILY = Family(
    title="T2I-Adapters",
    roots={"comfy.t2i_adapter.adapter:Adapter": plan_adapter},
    forms=FORMS,
)


def _first(module: Any) -> Any:
    return module.block1 if module.in_conv is None else module.in_conv
