"""Weights in blocks of bytes (GGUF files), unpacked at each call by our own graph in one pass over
the memory.
"""

from __future__ import annotations

from functools import partial

import torch

from ..kernels.packed_blocks import Packed, unpack
from .auxiliary import AuxiliaryGraphs, ends

#: So many blocks are compared at either end of a first result.
_BLOCKS = 64


def unpacked(weight: Packed, graphs: AuxiliaryGraphs) -> torch.Tensor | None:
    """Return an unpacked weight, in memory that may be written into; None if no graph computes it
    at this moment.

    Args:
        graphs: offered by format, dtype of the steps, and of the result.
    """
    graph = graphs.of((weight.form.name, weight.steps, weight.dtype), weight.device)
    if graph is None or not _is_taken(weight):
        return None
    name = weight.form.name
    about = {"what": f"unpacking of {name} weights", "weights": name}
    result = graph.run([weight.blocks], partial(_parts, weight), **about)
    return None if result is None else result.view(weight.shape)


def _parts(
    weight: Packed, result: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The ends of a result, the same in plain maths, and of what."""
    blocks, found = (ends(each, _BLOCKS) for each in (weight.blocks, result))
    return found, unpack(blocks, weight.form, weight.steps, weight.dtype), [blocks]


def _is_taken(weight: Packed) -> bool:
    """Whether a graph can read the blocks in their layout."""
    blocks = weight.blocks
    return (
        blocks.is_contiguous() and blocks.data_ptr() % 16 == 0 and len(blocks) <= weight.form.most
    )
