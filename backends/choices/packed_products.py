"""Products by weights in blocks of bytes (GGUF files), which are unpacked at each call: by a graph
of ours, in one pass over the memory; until that is loaded, step by step.
"""

from __future__ import annotations

import logging

import torch

from ..device.gpu import is_capturing
from ..kernels.packed_blocks import Packed, unpack
from ..kinds.tolerance import difference, tells_nothing
from ..reasons import of
from .own_products import Call, Offered

logger = logging.getLogger(__name__)

#: So many blocks are compared at either end of a first result.
_BLOCKS = 64
#: Of a graph: type of device, format, dtype of the steps, and of the result.
Form = tuple[str, str, torch.dtype, torch.dtype]


class PackedProducts:
    """For any thread."""

    def __init__(self) -> None:
        """No graph is offered yet."""
        self._offered: dict[Form, Offered] = {}
        #: What was compared with plain maths.
        self._trusted: set[Call] = set()

    def offer(self, form: Form, graph: Offered) -> None:
        """Have a graph unpack weights, once it is loaded."""
        self._offered[form] = graph

    def multiply(
        self, input: torch.Tensor, weight: Packed, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `linear(input, weight, bias)`."""
        return weight.multiply(input, bias, self._unpacked(weight))

    def _unpacked(self, weight: Packed) -> torch.Tensor | None:
        """The weight itself; None where no graph computes it at this moment."""
        form = weight.device.type, weight.form.name, weight.steps, weight.dtype
        graph = self._offered.get(form)
        loaded = None if graph is None else graph.loaded
        if graph is None or loaded is None or not _is_taken(weight):
            return None
        call = loaded.call
        is_trusted = call in self._trusted
        if not is_trusted and is_capturing(weight.device):  # nothing may be waited for
            return None
        (result,) = call([weight.blocks])
        if not is_trusted and not self._compare(graph, call, weight, result):
            return None
        found: torch.Tensor = result.view(weight.shape)
        return found

    def _compare(self, graph: Offered, call: Call, weight: Packed, result: torch.Tensor) -> bool:
        """Compare the ends of a first result with plain maths; a graph that differs is dropped."""
        blocks, found = (_ends(each) for each in (weight.blocks, result))
        exact = unpack(blocks, weight.form, weight.steps, weight.dtype)
        if tells_nothing([exact]):
            return True
        compared = difference([found], [exact], [blocks])
        if compared.is_good:
            self._trusted.add(call)
            return True
        why = of("differs", error=f"{compared.error:.1e}", weights=weight.form.name)
        logger.warning("Warmgraph does not unpack %s weights: it %s", weight.form.name, why)
        graph.drop(why)
        return False


def _is_taken(weight: Packed) -> bool:
    """Whether a graph reads the blocks as they lie."""
    blocks = weight.blocks
    return (
        blocks.is_contiguous() and blocks.data_ptr() % 16 == 0 and len(blocks) <= weight.form.most
    )


def _ends(tensor: torch.Tensor) -> torch.Tensor:
    if len(tensor) <= 2 * _BLOCKS:
        return tensor
    return torch.cat((tensor[:_BLOCKS], tensor[-_BLOCKS:]))
