"""Products of int8 rows by a graph of our own, wherever one is loaded (`families.int8_product`)."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import torch

from ..host_api.kitchen import Int8Weight
from ..kernels import int8_sums
from ..kinds.layout import CONTIGUOUS, aligned
from .auxiliary import Auxiliary, AuxiliaryGraphs, ends

#: Both sides of a weight are multiples of it; so are the addresses of tensors, in bytes.
SIXTEEN = 16
#: So many rows, and as many sixteens of columns, are compared at either end of a first result.
_ROWS, _COLUMNS16 = 8, 1


class OwnProduct(NamedTuple):
    """A graph that may be called now, and a bias for it that adds nothing."""

    graph: Auxiliary
    none: torch.Tensor

    @property
    def name(self) -> str:
        """Unique among versions."""
        return self.graph.graph.key[:8]

    def multiply(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return [count, columns].

        Args:
            rows, scales: int8 [count, width], float32 [count, 1].
            weight: int8 [columns, width].
            weight_scales: float32, for each of its rows or for all.
            bias: [columns], or none.

        Raises:
            RuntimeError: a first result differs from plain maths.
        """
        (count, width), columns = rows.shape, self.none.numel()
        factors = [
            rows.view(count, -1, SIXTEEN),
            scales,
            weight.view(-1, SIXTEEN, width // SIXTEEN, SIXTEEN),
            _of_each(weight_scales, columns, torch.float32),
            self.none if bias is None else _of_each(bias, columns, self.none.dtype),
        ]
        parts = partial(_parts, factors)
        result = self.graph.run(factors, parts, what="int8 product", weights="int8")
        if result is None:
            raise RuntimeError("it differs from plain maths")
        return result.view(count, columns)


class OwnProducts:
    """By the graphs that compute `form_of` their results' dtype; for any thread."""

    def __init__(self, graphs: AuxiliaryGraphs) -> None:
        """Set up over what is offered."""
        self.graphs = graphs
        #: In place of a bias. Captured calls read them at each replay, so none is freed.
        self._none: dict[tuple[torch.device, torch.dtype, int], torch.Tensor] = {}

    def of(self, like: torch.Tensor, weight: Int8Weight) -> OwnProduct | None:
        """Return what multiplies by a weight, with results on the device and of the dtype of this
        tensor; None without such a graph, or if it cannot take the weight at this moment.
        """
        columns = weight.values.shape[0]
        sort = like.device, like.dtype, columns
        graph = self.graphs.of(form_of(like.dtype), like.device, is_ready=sort in self._none)
        if graph is None or not _is_taken(weight.values):
            return None
        if sort not in self._none:
            self._none[sort] = like.new_zeros(columns // SIXTEEN, SIXTEEN)
        return OwnProduct(graph, self._none[sort])


def form_of(dtype: torch.dtype) -> Hashable:
    """Return what graphs with results of a dtype compute."""
    return "int8 product", dtype


def _parts(
    factors: list[torch.Tensor], result: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The ends of a result, the same in plain maths, and of what."""
    some = [ends(each, _ROWS) for each in factors[:2]]
    some += [ends(each, _COLUMNS16) for each in factors[2:]]
    found = ends(ends(result, _ROWS).transpose(0, 1), _COLUMNS16).transpose(0, 1)
    return found, int8_sums.multiply(*some), some


def _is_taken(weight: torch.Tensor) -> bool:
    """Whether a weight has the layout that graphs read, and dimensions in multiples of 16."""
    columns, width = weight.shape
    sides = columns % SIXTEEN == 0 == width % SIXTEEN
    return sides and weight.is_contiguous() and weight.data_ptr() % SIXTEEN == 0


def _of_each(values: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """One value for each column, in multiples of 16."""
    if values.numel() != columns:
        values = values.reshape(-1).expand(columns)
    return aligned(values.to(dtype).reshape(-1, SIXTEEN), CONTIGUOUS)
