"""The region plan of the host's T2I-Adapter for SD1.5 and SDXL: its residual blocks.

The block's downsampling stays the host's, which sets the pool's padding from each size's parity; so
do the first convolution and the unshuffling.
"""

from __future__ import annotations

from typing import Any

import torch

from ..contract import InputSpec
from . import unet
from .family import Family
from .plan import (
    Call,
    Dispatch,
    Form,
    Forward,
    Place,
    Plan,
    dispatch_one,
    host_forward,
    shallow_copy,
)

NAME = "adapter"


class Block(Form):
    """ResnetBlock behind its downsampling: `x [batch, C, height, width]` -> `C'` of that size."""

    family = NAME
    name = "block"
    children: tuple[str, ...] | None = ("in_conv", "block1", "act", "block2", "skep")

    def label(self, module: Any) -> str:
        return f"Adapter block {_first(module).in_channels}->{module.block2.out_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("batch", _first(module).in_channels, "height", "width")),)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return host_forward(shallow_copy(module, down_opt=torch.nn.Identity()), *inputs)


BLOCK = Block()
FORMS: dict[str, Form] = {BLOCK.name: BLOCK}


def plan_adapter(model: Any) -> Plan:
    """Cut the host's `Adapter` into regions."""
    plan = Plan(symbols=unet.SYMBOLS)
    plan.dispatches = [_dispatch(f"body.{i}", block) for i, block in enumerate(model.body)]
    return plan


FAMILY = Family(
    title="T2I-Adapters",
    roots={"comfy.t2i_adapter.adapter:Adapter": plan_adapter},
    forms=FORMS,
    special_pays=True,
)


def _dispatch(name: str, block: Any) -> Dispatch:
    def make(call: Call, host: Forward) -> Forward:
        def forward(x: torch.Tensor) -> torch.Tensor:
            result = call(block.down_opt(x) if block.down else x)
            return host() if result is None else result

        return forward

    return dispatch_one(Place(name, block, BLOCK), make)


def _first(module: Any) -> Any:
    return module.block1 if module.in_conv is None else module.in_conv
