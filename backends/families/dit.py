"""What blocks of the host's diffusion transformers share: their sizes, and what another node may
put into them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..contract import Symbol
from ..host_api.options import ATTENTION, PATCHES
from .plan import Call, Forward

#: Why a block is the host's where some tokens are modulated otherwise than the others.
REFERENCES = "called with reference images that have a timestep of their own"

#: Tokens of an image or a video, of a text, and of both together.
SYMBOLS = {
    s.name: s
    for s in (
        Symbol("batch", 1, 64, 2),
        Symbol("img", 1, 2**17, 4104),
        Symbol("txt", 1, 2**14, 264),
        Symbol("tokens", 1, 2**17, 4368),
    )
}

#: Patches that act inside a block.
_WITHIN = ("attn1_patch", "attn1_output_patch", "attn2_patch", "mlp_patch")


def changed(options: dict[str, Any]) -> str | None:
    """Return why a block must run the host's code in this call, or None.

    Args:
        options: the call's `transformer_options`.
    """
    patches = options.get(PATCHES)
    if patches:
        for name in _WITHIN:
            if name in patches:
                return f"another node patches {name}"
    if ATTENTION in options:
        return "another node overrides the attention function"
    return None


def last_layer(call: Call, host: Forward) -> Forward:
    """Make the forward of a last layer, which takes the tokens and what modulates them."""

    def forward(x: torch.Tensor, vec: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        result: torch.Tensor | None
        if all(value is None for value in (*rest, *named.values())):
            result = call(x, vec)
        else:
            result = call.decline(REFERENCES)
        return host(x, vec, *rest, **named) if result is None else result

    return forward
