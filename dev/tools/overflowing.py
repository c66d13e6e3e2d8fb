"""Small models in float16 that overflow: by their weights where the host bounds what comes of it,
by the text of one prompt elsewhere; and how far a result of such a model is from the host's.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

#: The largest number of float16, by which the host bounds.
MOST = 65504.0
#: As near to it lie numbers that round to infinity in one order of sums and not in another.
_EDGE = 0.99
#: By how much a text is larger: more than float16 holds.
_LOUD = 1e6


class Recipe(NamedTuple):
    """Which weights are larger, by how their names end, and how many times.

    Chosen so that what is bounded is a fifth of a stream at least and never all of it, that nothing
    else overflows before, and that the model is no more sensitive than a sound one: a number at the
    edge of float16 moves nothing but itself.
    """

    factors: dict[str, float]


def _streams(factor: float) -> Recipe:
    """Flux's blocks: a text's last one of two streams and the last one of one stream."""
    last = r"double_blocks\.1\.txt_mlp\.2\.weight|single_blocks\.1\.linear2\.weight"
    gates = r"(txt_mod|modulation|modulation_txt)\.lin\.weight|guidance_layer\.out_proj\.weight"
    return Recipe({last: factor, gates: 10})


_GATED = Recipe({r"layers\.\d\.feed_forward\.w[13]\.weight": 300})
#: By kind of `small_transformers`: whose blocks the host bounds in float16.
BOUNDED: dict[str, Recipe] = {
    "flux1": _streams(10000),
    "flux_fill": _streams(10000),
    "flux2": _streams(3000),
    "chroma": _streams(3000),
    "hunyuan": _streams(10000),
    "hunyuan_15": _streams(10000),
    "hunyuan_flow": _streams(3000),
    "hunyuan_image": _streams(10000),
    "zimage": _GATED,
    "lumina2": _GATED,
}


def enlarge(root: torch.nn.Module, kind: str) -> None:
    """Have a small model of `BOUNDED` overflow.

    Raises:
        ValueError: a name of the kind's recipe is none of its weights'.
    """
    found = set()
    with torch.no_grad():
        for name, weight in root.named_parameters():
            for ends, factor in BOUNDED[kind].factors.items():
                if re.search(f"({ends})$", name):
                    weight.mul_(factor)
                    found.add(ends)
    if left := BOUNDED[kind].factors.keys() - found:
        raise ValueError(f"{kind} must have weights named {', '.join(left)}")


def loud(conditioning: Any) -> Any:
    """A CONDITIONING whose text is more than float16 holds."""
    return [[text * _LOUD, facts] for text, facts in conditioning]


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """||ours - theirs|| / ||theirs|| over what is finite in theirs; infinite where ours is not
    finite there, unless that is at the edge of float16 among others beyond it.
    """
    finite = theirs.isfinite()
    lost = finite & ~ours.isfinite()
    if bool(theirs.isinf().any()):  # nobody has bounded them
        edge = lost & (theirs.abs() >= _EDGE * MOST) & ours.isinf()
        finite, lost = finite & ~edge, lost & ~edge
    if bool(lost.any()):
        return float("inf")
    a, b = (torch.where(finite, each, 0).double() for each in (ours, theirs))
    norm, error = float(b.norm()), float((a - b).norm())
    return error / norm if norm > 0 else error
