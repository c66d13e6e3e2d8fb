"""Products by weights in blocks of bytes (GGUF files), which are unpacked at each call: by our own
graph in one pass over the memory; until that is loaded, step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..kernels.packed_blocks import Packed, unpack
from .auxiliary import AuxiliaryGraphs, ends

#: So many blocks are compared at either end of a first result.
_BLOCKS = 64


class PackedProducts:
    """A `call_context.Caller` for weights in blocks; for any thread."""

    def __init__(self, graphs: AuxiliaryGraphs) -> None:
        """Set up over what is offered: graphs by format, dtype of the steps, and of the result."""
        self._graphs = graphs

    def multiply(
        self, input: torch.Tensor, weight: Packed, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `linear(input, weight, bias)`."""
        return weight.multiply(input, bias, self._unpacked(weight))

    def multiply_changed(
        self,
        input: torch.Tensor,
        weight: Packed,
        bias: torch.Tensor | None,
        change: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor | None:
        """Return `linear(input, change(weight), bias)`, None if no graph unpacks the weight at this
        moment.

        Args:
            change: gets memory that it may write into; None changes nothing.
        """
        unpacked = self._unpacked(weight)
        if unpacked is None:
            return None
        return weight.multiply(input, bias, unpacked if change is None else change(unpacked))

    def _unpacked(self, weight: Packed) -> torch.Tensor | None:
        """The unpacked weight; None if no graph computes it at this moment."""
        form = weight.form.name, weight.steps, weight.dtype
        graph = self._graphs.of(form, weight.device)
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
