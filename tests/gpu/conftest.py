"""A real GPU, graphs that were packed and loaded there, and children: fresh processes with the host
booted in one of its modes.

Those that are `slow` fill the VRAM on purpose, measure it or time the card, or take minutes: they
run one after the other, beside nothing. The others share it, and what one process has made or built
they all find.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from warmgraph_tools.by_path import load

ROOT = Path(__file__).resolve().parents[2]
ALIAS = "warmgraph_benchmarks"


def _lab_class() -> Any:
    if ALIAS not in sys.modules:
        load(ALIAS, ROOT / "dev" / "benchmarks")
    from warmgraph_benchmarks.lab import Lab

    return Lab


@pytest.fixture(scope="session")
def gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU that torch can use")


@pytest.fixture
def loaded(gpu: None) -> Callable[..., tuple[Any, str]]:
    """Returns the call of an exported graph that was compiled as ours are, called once with
    the tensors given, packed and loaded again; and its source. Options are `compile_wrapper`'s,
    `settings` are Inductor's besides.
    """
    from warmgraph_backends.torch_api import compiling, loading, packing

    def load(
        graph_module: Any,
        tensors: Sequence[Any],
        *,
        settings: Mapping[str, Any] = types.MappingProxyType({}),
        **options: Any,
    ) -> tuple[Any, str]:
        config = {
            **compiling.CONFIG,
            **settings,
            compiling.OWN_KERNELS: True,
            "compile_threads": 1,  # as in a worker: a pool's processes do not know these settings
        }
        module, source = compiling.compile_wrapper(graph_module, config, **options)
        module.call(list(tensors))
        payload, _ = packing.pack(module, source)
        return loading.unpack(payload), source

    return load


@pytest.fixture(scope="session")
def lab(gpu: None, host_tree: Path, run_folder: Path) -> Any:
    """Where children run; WARMGRAPH_BENCH_WORK names a benchmark's work folder to share."""
    work = os.environ.get("WARMGRAPH_BENCH_WORK")
    return _lab_class()(host_tree, Path(work) if work else run_folder / "gpu")


@pytest.fixture(scope="session")
def sdxl(lab: Any) -> dict[str, Any]:
    """Arguments that every child here takes: full-size SDXL and a store that holds its graphs."""
    from warmgraph_benchmarks.lab import BUILD_WORKERS

    lab.fill("sdxl", workers=BUILD_WORKERS)
    return {"model": lab.model("sdxl"), "kind": "sdxl", "store": lab.store("sdxl")}
