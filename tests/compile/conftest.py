"""Our kernels, run by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_BEFORE = """
import json, sys
import torch
sys.path.insert(0, sys.argv[1])
from by_path import load
sys.path.pop(0)
module = load("kernel", sys.argv[2])
shapes = json.loads(sys.argv[3])
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
            [
                sys.executable,
                "-c",
                _BEFORE + script + _AFTER,
                ROOT / "tools",
                source,
                json.dumps(shapes),
            ],
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
