"""`cli.py doctor` on a machine that is well: it compiles a small graph and looks into the host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CLI = Path(__file__).resolve().parents[2] / "cli.py"


@pytest.mark.slow
def test_a_machine_that_is_well_has_nothing_to_do(host_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    command = [sys.executable, str(CLI), "doctor", "--device", "cpu", "--comfyui", str(host_tree)]
    command += ["--base-directory", str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # nobody else's leftovers
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1]) == (0, "all is well"), done.stdout + done.stderr
    assert all(line.startswith("ok     ") for line in lines[:-1])
    assert any(
        "a small compiled graph: compiled for cpu, packed, loaded and run in" in s for s in lines
    )
    assert any(s.startswith("ok     ComfyUI: ") and s.endswith(str(host_tree)) for s in lines)
    assert "ok     ComfyUI's insides: all that Warmgraph uses is there" in lines
    assert any("C++ compiler: " in line for line in lines)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["user"]


@pytest.mark.skipif(sys.platform == "win32", reason="making a link needs rights on Windows")
def test_a_name_that_the_host_lacks_is_told_with_what_is_off(
    host_tree: Path, tmp_path: Path
) -> None:
    tree, base, empty = tmp_path / "tree", tmp_path / "base", tmp_path / "empty"
    for folder in (tree, base / "user", empty):
        folder.mkdir(parents=True)
    for entry in host_tree.iterdir():
        if entry.name != "comfy":
            (tree / entry.name).symlink_to(entry)
    shutil.copytree(host_tree / "comfy", tree / "comfy")
    with (tree / "comfy" / "samplers.py").open("a", encoding="utf-8") as file:
        file.write("\ndel CFGGuider.outer_sample\n")
    command = [sys.executable, str(CLI), "doctor", "--device", "cpu", "--comfyui", str(tree)]
    command += ["--base-directory", str(base)]
    environment = {**os.environ, "TMPDIR": str(base), "PATH": str(empty)}  # nothing is compiled
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    lines = [line for line in done.stdout.splitlines() if "ComfyUI's insides" in line]
    for line, name in zip(lines, ("DeepCache", "Step Cache"), strict=True):
        assert line.startswith(f"TO DO  ComfyUI's insides: {name}: off, for ")
        assert "comfy.samplers.CFGGuider.outer_sample is not there" in line
    assert done.returncode == 1
