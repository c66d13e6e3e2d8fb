"""Builds the graph of int8 products as a worker does for an H200, on a machine without one: kernels
are compiled for it, and what would be launched there is noted.

`python packed_product.py HOST BASE`: prints what it saw as a line of JSON, the last one.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Rows, and sixteenths of columns and of the depth.
COUNT, COLUMNS16, WIDTH16 = 300, 40, 5
#: The tile that is the quickest.
BEST = 1
STREAM = 7


def main() -> None:
    tree, base = map(Path, sys.argv[1:3])
    sys.path.insert(0, str(ROOT / "dev" / "tools"))
    from by_path import load_ours

    load_ours("backends", "tools")
    from warmgraph_tools import gpu_code, inprocess

    inprocess.boot(tree, base)
    import torch
    from torch._inductor.codecache import PyCodeCache

    write = PyCodeCache.write
    gpu_code._pretend([])
    PyCodeCache.write = write  # the code is run, too
    launched: list[tuple[Any, ...]] = []
    tried = pretend_to_launch(launched)

    from warmgraph_backends.compilers.lowering import config_of
    from warmgraph_backends.families import int8_product
    from warmgraph_backends.families.catalogue import code_of
    from warmgraph_backends.kernels import products
    from warmgraph_backends.torch_api import compiling, loading, packing
    from warmgraph_backends.torch_api.payload import read_payload
    from warmgraph_backends.worker.export import export

    description = int8_product.describe(torch.bfloat16, "cuda")
    program = export(code_of(description))
    torch.cuda.is_available = lambda: True  # now Inductor asks
    module, source = compiling.compile_wrapper(
        program.graph_module,
        {**config_of(program), "compile_threads": 1},
        last_pass=products.finish,
    )
    first = called(module.call, vars(module))
    payload, _ = packing.pack(module, source)
    launched.clear()
    call = loading.unpack(payload)
    again = called(call, call.__func__.__globals__)  # type: ignore[attr-defined]
    (launch,) = launched
    *grid, warps, shared, _, given, stream = launch[:9]
    (kernel,) = read_payload(payload).kernels
    seen = {
        "tried": tried,
        "shapes": [first, again],
        "grid": grid,
        "warps": warps,
        "shared": shared,
        "sizes": list(given[6:9]),
        "stream": stream,
        "chosen": kernel.choices,
    }
    print(json.dumps(seen))  # noqa: T201


def pretend_to_launch(launched: list[tuple[Any, ...]]) -> list[int]:
    """Have kernels of torch's static launcher be loaded and launched on no GPU; returns what
    takes the shared memory of each that is loaded.
    """
    import torch
    from torch._dynamo import device_interface
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    tried: list[int] = []

    class Launcher:
        @staticmethod
        def _load_kernel(path: str, name: str, shared: int, device: int) -> tuple[int, int, int]:
            assert Path(path).stat().st_size and device == 0
            tried.append(shared)
            return len(tried), 0, 0

        @staticmethod
        def _launch_kernel(function: int, *given: Any) -> None:
            launched.append(given)

    def timed(kernel: Any, *_: Any, **__: Any) -> dict[Any, int]:
        return {each: abs(place - BEST) for place, each in enumerate(kernel.launchers)}

    private: Any = torch._C
    private._StaticCudaLauncher = Launcher
    triton_heuristics.CachingAutotuner.benchmark_all_configs = timed
    triton_helpers.set_driver_to_gpu = lambda: None
    device_interface.DeviceGuard = lambda *_: nullcontext()
    torch.cuda._DeviceGuard = lambda *_: nullcontext()
    interface = SimpleNamespace(get_raw_stream=lambda device: STREAM, current_device=lambda: 0)
    triton_heuristics.CachingAutotuner.get_device_interface = lambda _: interface
    return tried


def called(call: Any, names: dict[str, Any]) -> list[int]:
    """Call a graph's code with tensors of the processor; returns the shape of the result."""
    import torch

    names["empty_strided_cuda"] = lambda shape, strides, dtype: torch.empty(shape, dtype=dtype)
    names["get_raw_stream"] = lambda device: STREAM
    rows = torch.zeros(COUNT, WIDTH16, 16, dtype=torch.int8)
    weight = torch.zeros(COLUMNS16, 16, WIDTH16, 16, dtype=torch.int8)
    scales, bias = torch.zeros(COLUMNS16, 16), torch.zeros(COLUMNS16, 16, dtype=torch.bfloat16)
    (result,) = call([rows, torch.zeros(COUNT, 1), weight, scales, bias])
    return list(result.shape)


if __name__ == "__main__":
    main()
