"""The trial of a large fleet, as it is run by hand, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_small_fleet_over_a_bucket_that_loses_requests_is_warm_and_builds_once(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "dev.benchmarks.fleet_trial", "losses", "--out", str(tmp_path)]
    command += ["--workers", "20", "--builders", "2", "--start-s", "1", "--build-s", "0.05"]
    command += ["--run-s", "0.2", "--missed-s", "0.2", "--limit-s", "60"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    case = json.loads((tmp_path / "fleet_trial.json").read_text("utf-8"))
    found = case["rows"]["losses"]
    assert case["ok"] and found["cold_at_the_end"] == 0
    assert (found["graphs_built"], found["graphs_built_again"]) == (8, 0)
    assert found["requests_lost"] > 0 and found["requests_by_kind"]["put safetensors"] >= 8
