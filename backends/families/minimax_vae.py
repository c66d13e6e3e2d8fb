"""Regions of the host's MiniMax H3 video VAE: the blocks of its transformer decoder.

The host cuts a latent into overlapping tiles and spans of frames (of one size if there are several)
and decodes each alone; that, blending and embeddings stay its own, as does the convolutional
encoder of short clips.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from ..contract import InputSpec, Symbol
from ..host_api.attention import of_eight_bits
from ..host_api.options import ATTENTION
from ..plans.binding import TAKEN, Forward, needed
from ..plans.family import Family
from ..plans.plan import Form, Plan, RegionCall
from ..reasons import of
from . import dit

NAME = "minimax_vae"

#: Patches of a tile and the registers after them.
SYMBOLS = {s.name: s for s in (Symbol("batch", 1, 64, 2), Symbol("tokens", 1, 2**18, 1797))}

#: Pairs of elements of each head that are rotated: three quarters of its 64 elements.
PAIRS = 24
_STACK = "decoder.transformer_blocks"


class Block(dit.Attending):
    """TransformerBlock: `x [batch, tokens, C]` and the rotation table -> as x, in its place."""

    family = NAME
    name = "block"
    writes: tuple[int, ...] = (0,)
    arguments = dit.takes(x=TAKEN, rotary_pos_emb=needed(dit.NOT_ROTATED))
    parts = ("attn", "ff")

    def label(self, module: Any) -> str:
        return f"MiniMax H3 VAE block {_width(module)}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (
            InputSpec("x", dtype, ("batch", "tokens", _width(module))),
            InputSpec("table", dtype, ("batch", "tokens", 1, PAIRS, 2, 2)),
        )


class Folded(Block):
    """The block of 0.36 and newer, which folds norms and residuals into its products: it gives
    another tensor, and attends in eight bits where its weights have them.
    """

    name = "folded block"
    writes = ()

    def serving(self, call: RegionCall, module: Any) -> Forward:
        return partial(self._serve, call, module.attn.to_qkv)

    def _serve(self, call: RegionCall, layer: Any, options: dit.Options, *inputs: Any) -> Any:
        attend = of_eight_bits(layer)
        return self.serve(call, {ATTENTION: attend} if attend else options, *inputs)


BLOCK, FOLDED = Block(), Folded()
FORMS: dict[str, Form] = {form.name: form for form in (BLOCK, FOLDED)}


def plan_minimax_vae(model: Any) -> Plan:
    from comfy.ldm.minimax import vae as host

    plan = Plan(symbols=SYMBOLS)
    table = model.decoder.pos_embed
    if table.n_dim * table.inv_freq.shape[0] != PAIRS:
        plan.outside.append((_STACK, of("other_rotation")))
        return plan
    folds = "pre_norm" in inspect.signature(host.FeedForward.forward).parameters
    dit.cut_stack(plan, model, _STACK, host.TransformerBlock, FOLDED if folds else BLOCK)
    return plan


FAMILY = Family(
    title="VAEs of MiniMax H3",
    roots={"comfy.ldm.minimax.vae:MiniMaxH3VideoVAE": plan_minimax_vae},
    forms=FORMS,
)


def _width(module: Any) -> int:
    return int(module.scale1.shape[0])
