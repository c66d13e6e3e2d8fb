"""Regions of the host's Qwen-Image 2.1 (0.37 and newer): its blocks.

Text and reference images precede the image in one row of tokens and do not attend to it. The host
computes them once per run and keeps their keys and values, so a block is called with them alone,
with the image alone, or (nothing kept) with both, and is passed an attention function that knows
what is kept. Embeddings, modulation and the last layer stay the host's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..contract import InputSpec, Symbol
from ..plans.binding import TAKEN
from ..plans.family import Family, Inputs
from ..plans.plan import Form, Plan, RegionCall, host_forward
from . import dit

NAME = "qwen21"

#: Tokens of a row, and what modulates them: a row for each image, and one for what comes before.
SYMBOLS = {
    s.name: s
    for s in (
        Symbol("batch", 1, 64, 2),
        Symbol("tokens", 1, 2**17, 4096),
        Symbol("rows", 1, 2**10, 3),
    )
}

#: Of the function that attends.
_ATTENTION = "attention"
#: Scale and gate, of attention and of the layers after it.
_PARTS = 4
#: What the host passes to all blocks: per factor a row for the prefix, rows for the images; a zero.
_Modulation = tuple[Any, ...]


class Block(dit.Attending):
    """QwenImage21TransformerBlock: `x [batch, tokens, C]`, `modulation [4, rows, C]`, `index
    [batch, tokens]` of each token's row in it, rotation table -> as x.
    """

    family = NAME
    name = "block"
    writes = (0,)
    parts = ("img_mlp",)
    arguments = dit.takes(x=TAKEN, mod=TAKEN, pe=TAKEN, attn_fn=TAKEN, prefix_len=TAKEN)

    def label(self, module: Any) -> str:
        return f"Qwen 2.1 block {_width(module)}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        width, half = _width(module), module.attn.norm_q.weight.shape[0] // 2
        return (
            InputSpec("x", dtype, ("batch", "tokens", width)),
            InputSpec("modulation", dtype, (_PARTS, "rows", width)),
            InputSpec("index", "int64", ("batch", "tokens")),
            InputSpec("table", "float32", (1, "tokens", 1, half, 2, 2)),
        )

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, modulation, index, table = inputs
        each = [(None, part[index]) for part in modulation.unbind(0)]
        zero = modulation.new_zeros(1, 1, 1)
        attend = dit.attention(_ATTENTION)
        return host_forward(
            module, x, (*each, zero), table, attend, 0, transformer_options=dit.options()
        )

    def gives_back(self, position: int, dtype: torch.dtype) -> bool:
        return dtype != torch.float16  # clipped, which makes another


BLOCK = Block()
FORMS: dict[str, Form] = {BLOCK.name: BLOCK}


def plan_qwen21(model: Any) -> Plan:
    from comfy.ldm.qwen_image21 import model as host

    plan = Plan(symbols=SYMBOLS)
    cls, serve = host.QwenImage21TransformerBlock, partial(_serve, _Rows())
    dit.cut_stack(plan, model, "transformer_blocks", cls, BLOCK, serve=serve)
    return plan


def _empty(model: Any, _: Mapping[str, Any], latent: tuple[int, ...]) -> Inputs:
    return {"c_crossattn": (latent[0], 64, model.txt_in.in_layer.in_features)}


FAMILY = Family(
    title="Qwen-Image 2.1",
    roots={"comfy.ldm.qwen_image21.model:QwenImage21Transformer2DModel": plan_qwen21},
    forms=FORMS,
    unread=dit.UNREAD_OPTIONS,
    empty=_empty,
)


def _width(module: Any) -> int:
    return int(module.attn.to_q.in_features)


class _Rows:
    """Modulation in one tensor, and the row each token takes: made once per call."""

    def __init__(self) -> None:
        self._of: _Modulation = ()
        self._modulation = torch.empty(0)
        self._index: dict[Any, torch.Tensor] = {}

    def __call__(self, mod: _Modulation, x: torch.Tensor, prefix: int) -> tuple[torch.Tensor, ...]:
        if self._of is not mod:
            pairs = mod[:_PARTS]
            rows = [torch.cat((before, images)).squeeze(1) for before, images in pairs]
            self._of, self._modulation, self._index = mod, torch.stack(rows), {}
        batch, tokens = x.shape[:2]
        key = batch, tokens, prefix
        if key not in self._index:
            images = self._modulation.shape[1] - 1
            index = torch.arange(1, images + 1, device=x.device).repeat(batch // images)
            index = index[:, None].repeat(1, tokens)
            index[:, :prefix] = 0
            self._index[key] = index
        return self._modulation, self._index[key]


def _serve(
    rows: _Rows,
    call: RegionCall,
    options: dit.Options,
    x: torch.Tensor,
    mod: _Modulation,
    pe: torch.Tensor,
    attend: Any,
    prefix: int,
) -> Any:
    inputs = (x, *rows(mod, x, prefix), pe)
    live = {_ATTENTION: attend}
    return dit.serve(call, dit.changed(options), options, *inputs, live=live)
