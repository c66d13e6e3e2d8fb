"""`cli.py doctor` on a machine that is well: it compiles a small graph and looks into the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CLI = Path(__file__).resolve().parents[2] / "cli.py"


def test_a_machine_that_is_well_has_nothing_to_do(host_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    command = [sys.executable, str(CLI), "doctor", "--device", "cpu", "--comfyui", str(host_tree)]
    command += ["--base-directory", str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # nobody else's leftovers
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1]) == (0, "all is well"), done.stdout + done.stderr
    assert all(line.startswith("ok     ") for line in lines[:-1])
    assert any("a small graph: compiled for cpu, packed, loaded and run in" in s for s in lines)
    assert any(s.startswith("ok     ComfyUI: ") and s.endswith(str(host_tree)) for s in lines)
    assert any("C++ compiler: " in line for line in lines)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["user"]
