"""Products of int8 rows by a graph of our own, wherever one is loaded (`families.int8_product`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..device.gpu import index, is_capturing
from ..host_api.kitchen import Int8Weight
from ..kernels import int8_sums
from ..kinds.layout import CONTIGUOUS, aligned
from .self_check import Call, Offered, SelfCheck, ends

#: Both sides of a weight are multiples of it; so are the addresses of tensors, in bytes.
SIXTEEN = 16
#: So many rows, and as many sixteens of columns, are compared at either end of a first result.
_ROWS, _COLUMNS16 = 8, 1


class OwnProduct(NamedTuple):
    """A graph that may be called now.

    Attributes:
        name: unique among versions.
        multiply: `(rows, scales, weight, weight_scales, bias)`: int8 [count, width] and float32
            [count, 1] by int8 [columns, width] and float32, for each of its rows or for all; a bias
            [columns] or none. Returns [count, columns].
    """

    name: str
    multiply: Callable[..., torch.Tensor]


class OwnProducts:
    """The loaded graphs, by where they run and their result's dtype; for any thread."""

    def __init__(self) -> None:
        """Nothing is offered yet."""
        self._offered: dict[tuple[str, torch.dtype, int], Offered] = {}
        self._compared = SelfCheck()
        #: In place of a bias. Captured calls read them at each replay, so none is freed.
        self._none: dict[tuple[torch.device, torch.dtype, int], torch.Tensor] = {}

    def offer(self, device: str, dtype: torch.dtype, graph: Offered, card: int = 0) -> None:
        """Have a graph compute products of a dtype on a type of device, once it is loaded.

        Args:
            card: which of these devices it is, by its number.
        """
        self._offered[device, dtype, card] = graph

    def of(self, like: torch.Tensor, weight: Int8Weight) -> OwnProduct | None:
        """Return what multiplies by a weight, with results on the device and of the dtype of this
        tensor; None without such a graph, or if it cannot take the weight at this moment.
        """
        graph = self._offered.get((like.device.type, like.dtype, index(like.device)))
        loaded = None if graph is None else graph.loaded
        if graph is None or loaded is None or not _is_taken(weight.values):
            return None
        call, columns = loaded.call, weight.values.shape[0]
        known, is_ready = graph, (like.device, like.dtype, columns) in self._none
        # While a call is captured nothing may be waited for, and what is made would be that call's.
        if is_capturing(like.device) and not (is_ready and call in self._compared):
            return None

        def multiply(
            rows: torch.Tensor,
            scales: torch.Tensor,
            weight: torch.Tensor,
            weight_scales: torch.Tensor,
            bias: torch.Tensor | None,
        ) -> torch.Tensor:
            count, width = rows.shape
            none = self._nothing(like, columns)
            factors = [
                rows.view(count, -1, SIXTEEN),
                scales,
                weight.view(-1, SIXTEEN, width // SIXTEEN, SIXTEEN),
                _of_each(weight_scales, columns, torch.float32),
                none if bias is None else _of_each(bias, columns, like.dtype),
            ]
            (result,) = call(list(factors))
            if call not in self._compared:
                self._compare(known, call, result, factors)
            found: torch.Tensor = result.view(count, columns)
            return found

        return OwnProduct(graph.key[:8], multiply)

    def _nothing(self, like: torch.Tensor, columns: int) -> torch.Tensor:
        """A bias that adds nothing, for so many columns."""
        form = like.device, like.dtype, columns
        found = self._none.get(form)
        if found is None:
            found = self._none[form] = like.new_zeros(columns // SIXTEEN, SIXTEEN)
        return found

    def _compare(
        self, graph: Offered, call: Call, result: torch.Tensor, factors: list[torch.Tensor]
    ) -> None:
        """Compare the ends of a first result with plain maths.

        Raises:
            RuntimeError: they differ; the graph is dropped.
        """
        rows, scales, weight, weight_scales, bias = factors
        some = [ends(each, _ROWS) for each in (rows, scales)]
        some += [ends(each, _COLUMNS16) for each in (weight, weight_scales, bias)]
        exact = int8_sums.multiply(*some)
        found = ends(ends(result, _ROWS).transpose(0, 1), _COLUMNS16).transpose(0, 1)
        about = {"what": "int8 product", "weights": "int8"}
        why = self._compared.problem(graph, call, found, exact, some, **about)
        if why is not None:
            raise RuntimeError(why)


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
