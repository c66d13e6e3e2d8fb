"""Graphs for a card that is not there: the host decides as on that card, kernels are compiled for
it, and a machine without it says why it does not use them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.device.gpu import pretended
from warmgraph_backends.storing.graph_file import read_header
from warmgraph_tools.by_path import ROOT

CHILD = Path(__file__).with_name("pretended_child.py")


def _built(tree: Path, folder: Path, target: str) -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton, which torch for CPUs does not bring")
    private = folder / "user" / "__warmgraph"
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tree), str(folder / "store"), str(private), target],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("target", "fp8", "nvfp4"),
    [
        ("sm_90", True, False),
        pytest.param("sm_86", False, False, marks=pytest.mark.slow),
        pytest.param("sm_89", True, False, marks=pytest.mark.slow),
        pytest.param("sm_120", True, True, marks=pytest.mark.slow),
    ],
)
def test_a_block_is_compiled_for_a_card_that_is_not_there(
    host_tree: Path, tmp_path: Path, target: str, fp8: bool, nvfp4: bool
) -> None:
    built = _built(host_tree, tmp_path, target)
    assert built["pretended"] == target
    assert (built["bf16"], built["fp8"], built["nvfp4"]) == (True, fp8, nvfp4)
    assert built["checks"] == [] and built["kernels"] >= 4
    manifest = read_header(Path(built["file"])).read()
    capability = target.removeprefix("sm_")
    capability = f"{capability[:-1]}.{capability[-1]}"
    assert manifest.target["capability"] == capability and manifest.target["device"] == "cuda"
    command = [sys.executable, str(ROOT / "cli.py"), "explain", built["file"]]
    command += ["--user-directory", str(tmp_path / "user")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert "  signed: by this machine" in told and "  intact: yes" in told
    assert f"  does not fit: GPU compute capability: made for {capability}, " in told


def test_nothing_is_pretended_in_any_other_process() -> None:
    assert pretended() is None
