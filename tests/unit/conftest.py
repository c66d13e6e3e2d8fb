"""The pack itself, imported as the host imports it: as a package, in the real host."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from warmgraph_tools.inprocess import Host

ROOT = Path(__file__).resolve().parents[2]
NAME = "warmgraph_pack"


@pytest.fixture(scope="session")
def pack(host: Host) -> ModuleType:
    """The pack's root module; its modules are `sys.modules["warmgraph_pack.nodes.server"]`..."""
    spec = importlib.util.spec_from_file_location(
        NAME, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


_BEFORE = """
import importlib.util, json, sys
import torch
spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
shapes = json.loads(sys.argv[2])
errors = {}

def note(name, found, exact):
    error = float((found.double() - exact).norm() / exact.norm())
    errors.setdefault(name, []).append(error)
"""
_AFTER = """
print(json.dumps(errors))
"""


@pytest.fixture
def interpreted() -> Callable[[str, str, Sequence[tuple[int, ...]]], dict[str, list[float]]]:
    """Runs a script over a module of the backends whose kernel Triton's interpreter runs: in a
    process of its own, for the interpreter is chosen when Triton is imported.

    The script has `module`, `shapes` and `note(name, found, exact)`; returned are the relative L2
    errors that were noted under each name.
    """
    pytest.importorskip("triton", reason="Triton is not installed")

    def run(name: str, script: str, shapes: Sequence[tuple[int, ...]]) -> dict[str, list[float]]:
        source = ROOT / "backends" / "kernels" / f"{name}.py"
        ran = subprocess.run(
            [sys.executable, "-c", _BEFORE + script + _AFTER, str(source), json.dumps(shapes)],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        errors: dict[str, list[float]] = json.loads(ran.stdout.splitlines()[-1])
        return errors

    return run
