"""The region plan of the host's NextDiT: Z-Image and Lumina 2, its blocks and the last layer.

Embeddings, padding and the rotation table stay the host's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..contract import InputSpec
from . import dit
from .family import Family, Inputs
from .plan import Call, Form, Forward, Plan, host_forward

NAME = "lumina"


class Layer(dit.Attending):
    """JointTransformerBlock: `x [batch, tokens, C]`, the rotation table and, where it is modulated,
    `adaln [batch, C']` -> as x.
    """

    family = NAME
    name = "layer"
    parts = ("attention", "feed_forward")
    hidden = ("layer_id",)

    def label(self, module: Any) -> str:
        return (
            f"NextDiT layer {module.dim}" if module.modulation else f"NextDiT refiner {module.dim}"
        )

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        x = InputSpec("x", dtype, ("batch", "tokens", module.dim))
        # One for all images: the host computes it once a step.
        table = InputSpec("freqs_cis", "float32", (1, "tokens", 1, module.head_dim // 2, 2, 2))
        if not module.modulation:
            return (x, table)
        return (x, table, _adaln(module, dtype))

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, table, *adaln = inputs
        return host_forward(module, x, None, table, *adaln, transformer_options=dit.options())


class Final(Form):
    """FinalLayer: `x [batch, tokens, C]`, `adaln [batch, C']` -> `[batch, tokens, patch]`."""

    family = NAME
    name = "final"

    def label(self, module: Any) -> str:
        return f"NextDiT last layer {module.linear.in_features}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        x = InputSpec("x", dtype, ("batch", "tokens", module.linear.in_features))
        return (x, _adaln(module, dtype))


LAYER, FINAL = Layer(), Final()
FORMS: dict[str, Form] = {form.name: form for form in (LAYER, FINAL)}


def plan_lumina(model: Any) -> Plan:
    """Cut a NextDiT into regions."""
    from comfy.ldm.lumina import model as host

    plan = Plan(symbols=dit.SYMBOLS)
    for stack in ("context_refiner", "noise_refiner", "layers"):
        dit.cut_stack(plan, model, stack, host.JointTransformerBlock, LAYER, _layer)
    dit.cut_last(plan, model, "final_layer", host.FinalLayer, FINAL)
    return plan


def _empty(model: Any, _: Mapping[str, Any], latent: tuple[int, ...]) -> Inputs:
    tokens = 64
    width = model.cap_embedder[-1].in_features
    return {"c_crossattn": (latent[0], tokens, width), "num_tokens": tokens}


FAMILY = Family(
    title="Z-Image, Lumina 2",
    roots={"comfy.ldm.lumina.model:NextDiT": plan_lumina},
    forms=FORMS,
    may_be_captured=dit.calls_of("NextDiT"),
    unread=dit.UNREAD_OPTIONS,
    empty=_empty,
)


def _adaln(module: Any, dtype: str) -> InputSpec:
    return InputSpec("adaln", dtype, ("batch", module.adaLN_modulation[-1].in_features))


def _layer(call: Call, host: Forward) -> Forward:
    def forward(
        x: torch.Tensor,
        x_mask: Any,
        freqs_cis: torch.Tensor,
        adaln_input: torch.Tensor | None = None,
        timestep_zero_index: Any = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        options = {} if transformer_options is None else transformer_options
        reason = dit.changed(options)
        if x_mask is not None:
            reason = dit.MASKED
        if timestep_zero_index is not None:
            reason = dit.REFERENCES
        given = (x, freqs_cis) if adaln_input is None else (x, freqs_cis, adaln_input)
        result: torch.Tensor | None = dit.serve(call, reason, options, *given)
        if result is not None:
            return result
        return host()

    return forward
