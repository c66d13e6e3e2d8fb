"""Graphs for a card that is not there: the host decides as on that card, kernels are compiled for
it, and a machine without it says why it does not use them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.building.worker_process import _environment
from warmgraph_backends.cleanup import owners, temporary
from warmgraph_backends.device.gpu import pretended
from warmgraph_backends.storing.graph_file import read_header
from warmgraph_backends.torch_api.kernel_names import LONGEST
from warmgraph_tools.by_path import ROOT

CHILD = Path(__file__).with_name("pretended_child.py")
BuiltFor = Callable[[str], dict[str, Any]]
#: Windows' longest path, and where its temporary folder is for a user's name of 20 letters.
_WINDOWS, _TEMP = 259, "C:\\Users\\abcdefghijklmnopqrst\\AppData\\Local\\Temp\\"
#: A process there whose number has six digits.
_OWNER = owners.Owner(999_996, 1_796_000_000_000, "0f0f0f0f")


@pytest.fixture(scope="module")
def built_for(host_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> BuiltFor:
    """Compiles the block for a target, once."""
    return cache(lambda target: _built(host_tree, tmp_path_factory.mktemp(target), target))


def _built(tree: Path, folder: Path, target: str) -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton, which torch for CPUs does not bring")
    private = folder / "user" / "__warmgraph"
    ours = folder / "ours"
    ours.mkdir()
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tree), str(folder / "store"), str(private), target],
        env={**_environment(os.environ, ours, threads=2), "CUDA_VISIBLE_DEVICES": ""},
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
    built_for: BuiltFor, target: str, fp8: bool, nvfp4: bool
) -> None:
    built = built_for(target)
    assert built["pretended"] == target
    assert (built["bf16"], built["fp8"], built["nvfp4"]) == (True, fp8, nvfp4)
    assert built["checks"] == [] and built["kernels"] >= 4
    assert not built["says_where"]  # a path holds a user's name, and files are shared
    manifest = read_header(Path(built["file"])).read()
    capability = target.removeprefix("sm_")
    capability = f"{capability[:-1]}.{capability[-1]}"
    assert manifest.target["capability"] == capability and manifest.target["device"] == "cuda"
    command = [sys.executable, str(ROOT / "cli.py"), "explain", built["file"]]
    command += ["--user-directory", str(Path(built["file"]).parents[1] / "user")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert max(map(len, built["names"])) <= LONGEST
    assert "  signed: by this machine" in told and "  intact: yes" in told
    assert f"  does not fit: GPU compute capability: made for {capability}, " in told


def test_no_file_of_a_build_has_a_path_that_is_too_long_for_windows(
    built_for: BuiltFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever we, Triton and Inductor open, make or move, a moment's files included."""
    built = built_for("sm_90")
    monkeypatch.setattr(owners, "me", lambda: _OWNER)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = _TEMP + temporary.make("worker").name
    paths = {folder + _at_its_longest(path, built["pid"]) for path in built["paths"]}
    for kept in ("triton_.+[.]cubin", "__grp__triton_.+[.]json"):  # of each kernel, by Triton
        found = [path for path in built["paths"] if re.search(kept, path)]
        assert len([path for path in found if "tmp.pid_" in path]) >= built["kernels"]
    longest = max(paths, key=len)
    assert len(longest) == _WINDOWS, longest  # not a character of the names is given away


def _at_its_longest(path: str, pid: int) -> str:
    """A path with the longest name of a kernel, and the number of `_OWNER`'s process."""
    path = re.sub(r"triton_(?!key)\w+(?=[.])", "k" * LONGEST, path)
    return re.sub(rf"(?<=[._]){pid}(?=[._])", str(_OWNER.pid), path)


def test_nothing_is_pretended_in_any_other_process() -> None:
    assert pretended() is None
