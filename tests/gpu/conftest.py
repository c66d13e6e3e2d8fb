"""Children on a real GPU, each a fresh process with the host booted in one of its modes."""

from __future__ import annotations

import os
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALIAS = "warmgraph_benchmarks"


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _lab_class() -> Any:
    if ALIAS not in sys.modules:
        folder = ROOT / "benchmarks"
        spec = util.spec_from_file_location(
            ALIAS, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        module = util.module_from_spec(spec)
        sys.modules[ALIAS] = module
        spec.loader.exec_module(module)
    from warmgraph_benchmarks.lab import Lab

    return Lab


@pytest.fixture(scope="session")
def lab(host_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where children run; WARMGRAPH_BENCH_WORK names a benchmark's work folder to share."""
    if not _has_cuda():
        pytest.skip("needs an NVIDIA GPU that torch can use")
    work = os.environ.get("WARMGRAPH_BENCH_WORK")
    return _lab_class()(host_tree, Path(work) if work else tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="session")
def sdxl(lab: Any) -> dict[str, Any]:
    """Arguments that every child here takes: full-size SDXL and a store that holds its graphs."""
    lab.fill("sdxl")
    return {"model": lab.model("sdxl"), "kind": "sdxl", "store": lab.store("sdxl")}
