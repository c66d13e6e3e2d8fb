"""Regions of the host's MiniMax H3: its blocks.

Embeddings, packing of text, references, audio and video into one row of tokens, timestep modulation
and the last layer stay the host's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..contract import InputSpec, Symbol
from ..plans.binding import OR_NONE, TAKEN
from ..plans.family import Family, Inputs
from ..plans.plan import (
    Form,
    Passage,
    Place,
    Plan,
    RegionCall,
    dispatch_one,
    host_forward,
    shallow_copy,
    unknown_layer,
)
from ..reasons import of
from . import dit

NAME = "minimax"

#: Tokens of all streams in one row, and how many kinds of them are modulated otherwise.
SYMBOLS = {s.name: s for s in (Symbol("tokens", 1, 2**18, 15700), Symbol("kinds", 1, 2**14, 6))}

#: Pairs of elements of each head that are rotated: a third for each of time, height and width.
PAIRS = 48
#: Shift, scale and gate, of attention and of the layers after it.
_PARTS = 6
#: One row of modulation for tokens from the first number to the second, or one for each.
_Segments = list[tuple[int, int, Any]]


class _Given(Passage):
    """Replaces the layer that makes the modulation by its result."""

    def __init__(self, modulation: torch.Tensor) -> None:
        super().__init__()
        self.modulation = modulation

    def forward(self, _: Any) -> tuple[torch.Tensor, ...]:
        return self.modulation.unbind(0)


class Block(dit.Attending):
    """DiTBlock: `x [tokens, C]`, `modulation [6, kinds, C]` of the kinds of tokens, `index
    [tokens]` of each token's kind, rotation table -> as x.
    """

    family = NAME
    name = "block"
    children = ("norm1", "norm2", "attn", "mlp")
    writes = (0,)
    arguments = dit.takes(
        x=TAKEN, t_emb=TAKEN, mod_segments=TAKEN, rope_freqs=TAKEN, attention=OR_NONE
    )
    whole = ("kinds",)
    parts = ("attn", "mlp")
    given = ("attn",)

    def label(self, module: Any) -> str:
        return f"MiniMax H3 block {module.adaln_proj.hidden}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        width = module.adaln_proj.hidden
        # Files with a curve in the place of the timestep's embedding modulate in float32.
        exact = dtype if module.adaln_proj.apply_silu else "float32"
        return (
            InputSpec("x", dtype, ("tokens", width)),
            InputSpec("modulation", exact, (_PARTS, "kinds", width)),
            InputSpec("index", "int64", ("tokens",)),
            InputSpec("table", dtype, (1, "tokens", 1, PAIRS, 2, 2)),
        )

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, modulation, index, table = inputs
        cut = shallow_copy(module, adaln_proj=_Given(modulation))
        segments = [(0, x.shape[0], index)]
        return host_forward(cut, x, None, segments, table, transformer_options=dit.options())


BLOCK = Block()
FORMS: dict[str, Form] = {BLOCK.name: BLOCK}


def plan_minimax(model: Any) -> Plan:
    from comfy.ldm.minimax import model as host

    plan = Plan(symbols=SYMBOLS)
    if 3 * model.rope.inv_freq.shape[0] != PAIRS:
        plan.outside.append(("blocks", of("other_rotation")))
        return plan
    kinds = _Kinds()
    for i, block in enumerate(model.blocks):
        place = Place(f"blocks.{i}", block, BLOCK, widens=True)
        if type(block) is host.DiTBlock:
            plan.dispatches.append(dispatch_one(place, partial(_serve, kinds, block)))
        else:
            plan.outside.append((place.name, unknown_layer(block)))
    return plan


def _empty(model: Any, _: Mapping[str, Any], latent: tuple[int, ...]) -> Inputs | None:
    if latent[0] != 1:  # refused by the host
        return None
    video = (1, model.latents_dim, *latent[2:])
    sounds = (1, model.audio_latents_dim, 2, 8)
    return {"c_crossattn": (1, 256, model.hidden_size), "latent_shapes": [video, sounds]}


FAMILY = Family(
    title="MiniMax H3",
    roots={"comfy.ldm.minimax.model:MiniMaxH3Model": plan_minimax},
    forms=FORMS,
    unread=dit.UNREAD_OPTIONS,
    empty=_empty,
)


class _Kinds:
    """Each token's kind: made once a call, and once a run if the host passes equal tokens."""

    def __init__(self) -> None:
        self._of: Any = None
        self._form: Any = None
        self._known = torch.empty(0)

    def __call__(self, segments: _Segments, device: torch.device) -> torch.Tensor:
        if self._of is segments:
            return self._known
        plain = all(isinstance(row, int) for *_, row in segments)
        form = (tuple(segments), device) if plain else None
        if form is None or self._form != form:
            self._known = _index(segments, device)
        self._of, self._form = segments, form
        return self._known


def _index(segments: _Segments, device: torch.device) -> torch.Tensor:
    rows = [
        row if isinstance(row, torch.Tensor) else torch.full((end - begin,), row)
        for begin, end, row in segments
    ]
    if not any(row.device == device for row in rows):
        return torch.cat(rows).to(device)
    return torch.cat([row.to(device) for row in rows])


def _serve(
    kinds: _Kinds,
    module: Any,
    call: RegionCall,
    options: dit.Options,
    x: torch.Tensor,
    t_emb: torch.Tensor,
    segments: _Segments,
    table: torch.Tensor,
    attention: Any,
) -> Any:
    modulation = torch.stack(module.adaln_proj(t_emb))
    # The host's code asks for no patches within blocks.
    inputs = (x, modulation, kinds(segments, x.device), table)
    live = None if attention is None else {"attn": attention}
    served = dit.serve(call, None, options, *inputs, live=live)
    return None if served is None else x  # which holds the result
