"""Regions of the host's MiniMax H3 video VAE: the blocks of its transformer decoder.

The host cuts a latent into overlapping tiles and spans of frames (of one size if there are several)
and decodes each alone; that, blending and embeddings stay its own, as does the convolutional
encoder of short clips.
"""

from __future__ import annotations

from typing import Any

from ..contract import InputSpec, Symbol
from ..plans.binding import TAKEN, needed
from ..plans.family import Family
from ..plans.plan import Form, Plan
from ..reasons import of
from . import dit

NAME = "minimax_vae"

#: Patches of a tile and the registers after them.
SYMBOLS = {s.name: s for s in (Symbol("batch", 1, 64, 2), Symbol("tokens", 1, 2**18, 1797))}

#: Pairs of elements of each head that are rotated: three quarters of its 64 elements.
PAIRS = 24
_STACK = "decoder.transformer_blocks"


class Block(dit.Attending):
    """TransformerBlock: `x [batch, tokens, C]` and the rotation table -> as x."""

    family = NAME
    name = "block"
    writes = (0,)
    arguments = dit.takes(x=TAKEN, rotary_pos_emb=needed(dit.NOT_ROTATED))
    parts = ("attn", "ff")

    def label(self, module: Any) -> str:
        return f"MiniMax H3 VAE block {_width(module)}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (
            InputSpec("x", dtype, ("batch", "tokens", _width(module))),
            InputSpec("table", dtype, ("batch", "tokens", 1, PAIRS, 2, 2)),
        )


BLOCK = Block()
FORMS: dict[str, Form] = {BLOCK.name: BLOCK}


def plan_minimax_vae(model: Any) -> Plan:
    from comfy.ldm.minimax import vae as host

    plan = Plan(symbols=SYMBOLS)
    table = model.decoder.pos_embed
    if table.n_dim * table.inv_freq.shape[0] != PAIRS:
        plan.outside.append((_STACK, of("other_rotation")))
        return plan
    dit.cut_stack(plan, model, _STACK, host.TransformerBlock, BLOCK)
    return plan


FAMILY = Family(
    title="VAEs of MiniMax H3",
    roots={"comfy.ldm.minimax.vae:MiniMaxH3VideoVAE": plan_minimax_vae},
    forms=FORMS,
)


def _width(module: Any) -> int:
    return int(module.scale1.shape[0])
