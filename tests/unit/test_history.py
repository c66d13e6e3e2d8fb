"""Runs are kept, few of them, whatever becomes of the file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from warmgraph_backends.runtime.pace import COMPILED, Run
from warmgraph_backends.sessions.history import FILE_NAME, KEPT, History


def session(run: Run | None, counts: tuple[int, int] = (0, 0)) -> Any:
    """What a history asks of a session."""
    pace = SimpleNamespace(take_run=lambda: run)
    return SimpleNamespace(name="SDXL", pace=pace, take_counts=lambda: counts)


def run(steps: int = 20, ms: float | None = 31.25) -> Run:
    return Run("1024x1024", 2, steps, COMPILED, ms, 61.0)


def test_a_run_is_told_as_plain_data_and_survives_a_restart(tmp_path: Path) -> None:
    history = History(tmp_path, clock=lambda: 1_790_000_000.6)
    assert history.runs() == [] and not history.note(session(None)) and history.version == 0
    assert history.note(session(run(), (23, 1))) and history.version == 1
    entry = {
        "at": 1_790_000_001,
        "model": "SDXL",
        "size": "1024x1024",
        "batch": 2,
        "steps": 20,
        "form": "compiled",
        "ms": 31.25,
        "eager_ms": 61.0,
        "builds": 23,
        "misses": 1,
    }
    assert history.runs() == [entry]
    assert History(tmp_path).runs() == [entry]


def test_few_runs_are_kept_and_the_file_stays_small(tmp_path: Path) -> None:
    history = History(tmp_path)
    for steps in range(1, 4 * KEPT + 6):
        history.note(session(run(steps)))
        lines = (tmp_path / FILE_NAME).read_text().splitlines()
        assert len(lines) <= 2 * KEPT
    newest = list(range(3 * KEPT + 6, 4 * KEPT + 6))
    assert [entry["steps"] for entry in history.runs()] == newest
    assert [entry["steps"] for entry in History(tmp_path).runs()] == newest


@pytest.mark.parametrize(
    "bad",
    [
        b'{"at": 1, "model": "SDXL"',  # half a line
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"{}",
        b'{"at": "now"}',
        b"null",
    ],
)
def test_lines_that_are_no_runs_are_passed_over(tmp_path: Path, bad: bytes) -> None:
    History(tmp_path).note(session(run(7)))
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(bad + b"\n")
    History(tmp_path).note(session(run(8)))
    assert [entry["steps"] for entry in History(tmp_path).runs()] == [7, 8]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ms", -1.0),
        ("ms", "31"),
        ("at", 1.5),
        ("batch", True),
        ("model", "x" * 300),
        ("form", "magic"),
        ("more", 1),
    ],
)
def test_a_field_that_is_not_as_it_is_written_costs_its_line(
    tmp_path: Path, field: str, value: Any
) -> None:
    history = History(tmp_path)
    history.note(session(run()))
    line = json.dumps({**history.runs()[0], field: value})
    (tmp_path / FILE_NAME).write_text(line + "\n")
    assert History(tmp_path).runs() == []


@pytest.mark.skipif(
    sys.platform == "win32" or os.geteuid() == 0, reason="needs a folder that is read-only"
)
def test_a_folder_that_is_read_only_costs_only_what_comes_after_a_restart(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    history = History(tmp_path)
    assert history.note(session(run())) and len(history.runs()) == 1


def test_a_folder_that_is_gone_costs_only_what_comes_after_a_restart(tmp_path: Path) -> None:
    history = History(tmp_path / "gone")
    assert history.note(session(run())) and len(history.runs()) == 1
    assert History(tmp_path / "gone").runs() == []
