"""The graph of int8 products on a processor, tuned for small sizes, beside plain maths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from warmgraph_backends.contract import RegionSpec
from warmgraph_backends.families import int8_product
from warmgraph_backends.kernels import int8_sums

from .lab import Lab, relative

#: Rows, and sixteenths of columns and of the depth.
SIZES = [(1, 1, 1), (17, 3, 5), (257, 2, 9), (2, 40, 130)]
#: What it is tuned for here, by symbol.
EXAMPLE = {"rows": 8, "columns": 3, "width": 4}


def described(dtype: torch.dtype) -> RegionSpec:
    """The kind, which takes the same sizes as any."""
    whole = int8_product.describe(dtype, "cpu")
    symbols = tuple(replace(each, example=EXAMPLE[each.name]) for each in whole.symbols)
    return replace(whole, symbols=symbols)


def factors(dtype: torch.dtype, rows: int, columns16: int, width16: int) -> list[torch.Tensor]:
    """What a product is computed from."""
    draw = torch.Generator().manual_seed(rows)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, dtype=torch.int8, generator=draw)

    return [
        whole(rows, width16, 16),
        1e-2 * torch.rand(rows, 1, generator=draw),
        whole(columns16, 16, width16, 16),
        1e-2 * torch.rand(columns16, 16, generator=draw),
        torch.randn(columns16, 16, generator=draw).to(dtype),
    ]


def seen(lab: Lab, dtype: torch.dtype, *, build: bool) -> dict[str, Any]:
    """Take the graph from a lab, call it, and say how it went."""
    graph = lab.graph(described(dtype), build=build)
    errors = []
    for sizes in SIZES if graph.loaded is not None else ():
        given = factors(dtype, *sizes)
        (found,) = graph.loaded.call(list(given))
        exact = int8_sums.multiply(*given)
        assert found.shape == exact.shape and found.dtype is dtype
        errors.append(relative(found.float(), exact.float()))
    return {
        "key": graph.key,
        "source": graph.source,
        "reason": graph.reason,
        "builds": lab.builds(),
        "errors": errors,
    }
