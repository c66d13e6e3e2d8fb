"""Regions of the host's NextDiT (Z-Image, Lumina 2): its blocks and the last layer.

Embeddings, padding and the rotation table stay the host's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..contract import InputSpec
from ..plans.binding import OPTIONAL, TAKEN
from ..plans.family import Family, Inputs
from ..plans.plan import Form, Plan, host_forward
from . import dit

NAME = "lumina"


class Layer(dit.Attending):
    """JointTransformerBlock: `x [batch, tokens, C]`, rotation, optional `adaln [batch, C']` -> as
    x.
    """

    family = NAME
    name = "layer"
    parts = ("attention", "feed_forward")
    hidden = ("layer_id",)
    arguments = dit.takes(
        x=TAKEN,
        x_mask=dit.MASKED,
        freqs_cis=TAKEN,
        adaln_input=OPTIONAL,
        timestep_zero_index=dit.REFERENCES,
    )

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
        width = module.adaLN_modulation[-1].in_features
        return (x, table, InputSpec("adaln", dtype, ("batch", width)))

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, table, *adaln = inputs
        return host_forward(module, x, None, table, *adaln, transformer_options=dit.options())


LAYER, LAST = Layer(), dit.LastLayer(NAME, "NextDiT", tokens="tokens")
FORMS: dict[str, Form] = {form.name: form for form in (LAYER, LAST)}


def plan_lumina(model: Any) -> Plan:
    from comfy.ldm.lumina import model as host

    plan = Plan(symbols=dit.SYMBOLS)
    for stack in ("context_refiner", "noise_refiner", "layers"):
        dit.cut_stack(plan, model, stack, host.JointTransformerBlock, LAYER)
    dit.cut_last(plan, model, "final_layer", host.FinalLayer, LAST)
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
