"""Products by weights in blocks of bytes (GGUF files), which are unpacked at each call: by our own
graph in one pass over the memory; until that is loaded, step by step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..device.gpu import index, is_capturing
from ..kernels.packed_blocks import Packed, unpack
from .self_check import Call, Offered, SelfCheck, ends

#: So many blocks are compared at either end of a first result.
_BLOCKS = 64
#: Of a graph: type of device, format, dtype of the steps, and of the result.
Form = tuple[str, str, torch.dtype, torch.dtype]


class PackedProducts:
    """A `host_layer.Caller` for weights in blocks; for any thread."""

    def __init__(self) -> None:
        """No graph is offered yet."""
        self._offered: dict[tuple[Form, int], Offered] = {}
        self._compared = SelfCheck()

    def offer(self, form: Form, graph: Offered, card: int = 0) -> None:
        """Have a graph unpack weights, once it is loaded; on the card of this number."""
        self._offered[form, card] = graph

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
        form = weight.device.type, weight.form.name, weight.steps, weight.dtype
        graph = self._offered.get((form, index(weight.device)))
        loaded = None if graph is None else graph.loaded
        if graph is None or loaded is None or not _is_taken(weight):
            return None
        call = loaded.call
        is_compared = call in self._compared
        if not is_compared and is_capturing(weight.device):  # nothing may wait
            return None
        (result,) = call([weight.blocks])
        if not is_compared and not self._is_good(graph, call, weight, result):
            return None
        found: torch.Tensor = result.view(weight.shape)
        return found

    def _is_good(self, graph: Offered, call: Call, weight: Packed, result: torch.Tensor) -> bool:
        """Compare the ends of a first result with plain maths; a graph that differs is dropped."""
        blocks, found = (ends(each, _BLOCKS) for each in (weight.blocks, result))
        exact = unpack(blocks, weight.form, weight.steps, weight.dtype)
        about = {"what": f"unpacking of {weight.form.name} weights", "weights": weight.form.name}
        return self._compared.problem(graph, call, found, exact, [blocks], **about) is None


def _is_taken(weight: Packed) -> bool:
    """Whether a graph can read the blocks in their layout."""
    blocks = weight.blocks
    return (
        blocks.is_contiguous() and blocks.data_ptr() % 16 == 0 and len(blocks) <= weight.form.most
    )
