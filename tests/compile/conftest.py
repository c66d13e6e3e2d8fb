"""Our kernels, run by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from warmgraph_tools.by_path import ADOPT

_BEFORE = f"""{ADOPT}
import importlib, json
import torch
module = importlib.import_module(sys.argv[1])
shapes = json.loads(sys.argv[2])
torch.manual_seed(0)
errors = {{}}

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
        module = f"warmgraph_backends.kernels.{name}"
        ran = subprocess.run(
            [sys.executable, "-c", _BEFORE + script + _AFTER, module, json.dumps(shapes)],
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
