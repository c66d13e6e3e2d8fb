"""Regions of the host's Krea 2: its blocks, those of its text fusion, the last layer.

Embeddings, modulation vectors and the rotation table stay the host's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..contract import InputSpec, Symbol
from ..plans.binding import TAKEN
from ..plans.family import Family, Inputs
from ..plans.plan import Form, Plan, host_forward
from ..reasons import Reason
from . import dit

NAME = "krea"

#: The text encoder's layers are fused for each token by itself, as a batch of `rows`.
SYMBOLS = dit.SYMBOLS | {
    s.name: s for s in (Symbol("rows", 1, 2**18, 264), Symbol("layers", 1, 64, 12))
}


class Single(dit.Attending):
    """SingleStreamBlock: `x [batch, tokens, C]`, `vec [batch, 1, 6 C]`, rotation table -> as x."""

    family = NAME
    name = "single"
    parts = ("attn", "mlp")
    arguments = dit.takes(
        x=TAKEN, vec=TAKEN, freqs=TAKEN, mask=dit.MASKED, timestep_zero_index=dit.REFERENCES
    )

    def label(self, module: Any) -> str:
        return f"Krea block {_width(module)}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        width, half = _width(module), module.attn.headdim // 2
        return (
            InputSpec("x", dtype, ("batch", "tokens", width)),
            InputSpec("vec", dtype, ("batch", 1, 6 * width)),
            InputSpec("freqs", "float32", ("batch", 1, "tokens", half, 2, 2)),
        )

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return host_forward(module, *inputs, transformer_options=dit.options())


class Text(dit.Attending):
    """TextFusionBlock over a text: `x [batch, txt, C]` -> as x."""

    family = NAME
    name = "text"
    parts = ("attn", "mlp")
    arguments = dit.takes(x=TAKEN, mask=dit.MASKED)

    def changed(self, options: dit.Options) -> Reason | None:
        return None  # patches are for blocks that are counted, which these are not

    def label(self, module: Any) -> str:
        return f"Krea text block {_width(module)}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("batch", "txt", _width(module))),)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return host_forward(module, *inputs, transformer_options=dit.options())


class Layers(Text):
    """TextFusionBlock over the text encoder's layers: `x [rows, layers, C]` -> as x."""

    name = "layers"

    def label(self, module: Any) -> str:
        return f"Krea layer fusion {_width(module)}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("rows", "layers", _width(module))),)


SINGLE, TEXT, LAYERS = Single(), Text(), Layers()
LAST = dit.LastLayer(NAME, "Krea", tokens="tokens", vec=("batch", 1))
FORMS: dict[str, Form] = {form.name: form for form in (SINGLE, TEXT, LAYERS, LAST)}


def plan_krea(model: Any) -> Plan:
    from comfy.ldm.krea2 import model as host

    plan = Plan(symbols=SYMBOLS)
    for stack, cls, form in (
        ("txtfusion.layerwise_blocks", host.TextFusionBlock, LAYERS),
        ("txtfusion.refiner_blocks", host.TextFusionBlock, TEXT),
        ("blocks", host.SingleStreamBlock, SINGLE),
    ):
        dit.cut_stack(plan, model, stack, cls, form)
    dit.cut_last(plan, model, "last", host.LastLayer, LAST)
    return plan


def _empty(model: Any, _: Mapping[str, Any], latent: tuple[int, ...]) -> Inputs:
    return {"c_crossattn": (latent[0], 64, model.txtlayers * model.txtdim)}


FAMILY = Family(
    title="Krea 2",
    roots={"comfy.ldm.krea2.model:SingleStreamDiT": plan_krea},
    forms=FORMS,
    may_be_captured=dit.calls_of("SingleStreamDiT"),
    unread=dit.UNREAD_OPTIONS,
    empty=_empty,
)


def _width(module: Any) -> int:
    return int(module.prenorm.scale.shape[0])
