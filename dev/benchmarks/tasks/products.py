"""Products by rotated int8 weights in each way, at sizes of people's models."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..measure import elapsed_ms, mark, rel_l2
from ..pack import POLL_S, open_engine
from .common import BUILD_LIMIT_S, partial

#: Runs of each way that are not counted.
_WARM = 3


def int8_product(
    *,
    store: str,
    shapes: Mapping[str, list[int]],
    workers: int = 0,
    rounds: int = 15,
    example: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Rotate, quantise and multiply bfloat16 rows in each way by turns: the library's layer, its
    product of rows that our kernel quantised, and our graph's of the same. Then rows that are int8
    already: products alone. On a processor, which has no such kernel, nothing is rotated.

    Args:
        shapes: rows, columns and depth, by name.
        example: what the graph is tuned for, by symbol, where that is not the usual.

    Returns:
        {"rows": {name: {"ms": by way, "alone_ms", "tops": of products alone, "ratio": the library's
        time by ours, "rel_l2": of each way from the library's}}, "tile", "build_seconds"}
    """
    import torch
    from comfy.model_management import get_torch_device

    from warmgraph_backends.choices.own_products import form_of

    engine = open_engine(Path(store), workers=workers)
    device = get_torch_device()
    try:
        graph = _graph(engine, device, example)
        products = engine._shared.choices.products.int8
        products.own.graphs.offer(form_of(torch.bfloat16), device.type, graph)
        result: dict[str, Any] = {
            "tile": _tile(engine, graph),
            "build_seconds": graph.loaded.build_seconds,
            "rows": {},
        }
        for name, (rows, columns, depth) in shapes.items():
            result["rows"][name] = _row(products, device, rows, columns, depth, rounds)
            partial(result)
    finally:
        engine.close()
    return result


def _graph(engine: Any, device: Any, example: Mapping[str, int] | None) -> Any:
    """Our graph for a device, loaded or built."""
    from dataclasses import replace

    import torch

    from warmgraph_backends.compilers.registry import backend_named
    from warmgraph_backends.families import int8_product
    from warmgraph_backends.target import keys

    description = int8_product.describe(torch.bfloat16, device.type)
    if example is not None:
        symbols = (replace(each, example=example[each.name]) for each in description.symbols)
        description = replace(description, symbols=tuple(symbols))
    backend = backend_named("inductor")
    graph = engine._graphs.graph(description, backend, keys.target(device.type, backend))
    engine._graphs.request([graph], [], build=True)
    engine._graphs.settle()
    end = time.monotonic() + BUILD_LIMIT_S
    while graph.is_pending and time.monotonic() < end:
        time.sleep(POLL_S)
    if graph.loaded is None:
        raise RuntimeError(f"the graph of int8 products must be there, got {graph.reason}")
    return graph


def _tile(engine: Any, graph: Any) -> list[str]:
    """Which form of our kernel was the quickest when it was built."""
    file = engine._store.load(graph.key, ())
    return [kernel.words for kernel in graph.backend.describe_payload(file.payload).kernels]


def _row(
    products: Any, device: Any, rows: int, columns: int, depth: int, rounds: int
) -> dict[str, Any]:
    """Time one product in each way."""
    import torch
    from comfy_kitchen.tensor import QuantizedTensor

    from warmgraph_backends.choices import int8_products
    from warmgraph_backends.host_api import kitchen
    from warmgraph_backends.kernels.int8_rows import GROUP, Int8Rows
    from warmgraph_backends.torch_api.cuda_queue import current_stream

    on_gpu = device.type != "cpu"
    draw = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=draw)

    weight = QuantizedTensor.from_float(
        random(columns, depth) / depth**0.5,
        kitchen.INT8_LAYOUT,
        per_channel=True,
        convrot=on_gpu,
        convrot_groupsize=GROUP,
    )
    x, parts = random(rows, depth), kitchen.int8_weight(weight)
    library, own = kitchen.int8_product(x, parts, None), products.own.of(x, parts)
    layer = int8_products._Layer(weight, None, parts)
    kernel = Int8Rows(device) if on_gpu else None
    runs = {
        "library": lambda: library(x, parts, None),
        int8_products.OURS: lambda: int8_products._ours([own], x, kernel, [layer], "")[0],
    }
    if kernel is not None:
        runs[int8_products.APART] = lambda: int8_products._apart(x, kernel, [layer], "")[0]
    reference = runs["library"]()
    errors = {name: rel_l2(run(), reference) for name, run in runs.items()}
    del reference
    ms = _by_turns(runs, rounds)
    values, scales = kitchen.int8_rows(x)
    given = values, scales, parts.values, parts.scale, None
    alone = {int8_products.OURS: lambda: own.multiply(*given)}
    if on_gpu:
        stream = current_stream(torch.cuda.current_device())
        alone["library"] = lambda: kitchen.multiply_int8_rows(*given, x.dtype, stream)
    alone_ms = _by_turns(alone, rounds)
    return {
        "ms": ms,
        "ratio": round(ms["library"] / ms[int8_products.OURS], 3),
        "alone_ms": alone_ms,
        "tops": {name: round(2e-9 * rows * columns * depth / t) for name, t in alone_ms.items()},
        "rel_l2": {name: float(f"{error:.2e}") for name, error in errors.items()},
    }


def _by_turns(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median milliseconds of each, by the GPU's clock in the midst of the others' work."""
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
    for number in range(_WARM + rounds):
        for name, run in runs.items():
            begin = mark()
            run()
            if number >= _WARM:
                marks[name].append((begin, mark()))
    return {
        name: round(statistics.median(elapsed_ms(*pair) for pair in pairs), 4)
        for name, pairs in marks.items()
    }
