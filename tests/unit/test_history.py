"""Runs are kept, few of them, whatever becomes of the file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from warmgraph_backends.runtime.pace import COMPILED, EAGER, EXACT, TimedRun
from warmgraph_backends.sessions import history as room
from warmgraph_backends.sessions.comparison import comparison
from warmgraph_backends.sessions.history import FILE_NAME, KEPT, TOLD, History


def session(run: TimedRun | None, counts: tuple[int, int] = (0, 0)) -> Any:
    """What a history asks of a session."""
    pace = SimpleNamespace(take_run=lambda: run)
    return SimpleNamespace(name="SDXL", pace=pace, take_counts=lambda: counts)


def run(steps: int = 20, ms: float | None = 31.25, **changes: Any) -> TimedRun:
    known = TimedRun("1024x1024", 2, steps, COMPILED, ms, 0.5, busy=False, eager_ms=61.0)
    return known._replace(**changes)


def test_a_run_is_told_as_plain_data_and_survives_a_restart(tmp_path: Path) -> None:
    history = History(tmp_path, clock=lambda: 1_790_000_000.6)
    assert history.runs() == [] and not history.note(session(None)) and history.version == 0
    assert history.note(session(run(), (23, 1)), "a prompt") and history.version == 1
    entry = {
        "at": 1_790_000_000.6,
        "model": "SDXL",
        "size": "1024x1024",
        "batch": 2,
        "steps": 20,
        "form": "compiled",
        "ms": 31.25,
        "noise": 0.5,
        "busy": False,
        "eager_ms": 61.0,
        "builds": 23,
        "misses": 1,
        "prompt": "a prompt",
    }
    assert history.runs() == [entry]
    assert History(tmp_path).runs() == [entry]


def test_few_runs_are_kept_and_the_file_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2 * KEPT * 400 < room._MAX_BYTES, "a line has 300 characters"
    monkeypatch.setattr(room, "KEPT", TOLD)
    history = History(tmp_path)
    for steps in range(1, 4 * TOLD + 6):
        history.note(session(run(steps)))
        lines = (tmp_path / FILE_NAME).read_text().splitlines()
        assert len(lines) <= 2 * TOLD
    newest = list(range(3 * TOLD + 6, 4 * TOLD + 6))
    assert [entry["steps"] for entry in history.runs()] == newest
    assert [entry["steps"] for entry in History(tmp_path).runs()] == newest


def test_what_a_day_saved_is_of_measured_pairs_alone(tmp_path: Path) -> None:
    now = [1_790_000_000.0]
    history = History(tmp_path, clock=lambda: now[0])
    assert history.saved_today() == {"seconds": 0.0, "runs": 0}
    history.note(session(run()))
    now[0] += 24 * 60 * 60
    for each in (
        run(20, 31.0),
        run(10, 41.0, form=EXACT, batch=1),
        run(5, 81.0, batch=1),  # slower: it counts as such
        run(20, None),
        run(20, 31.0, eager_ms=None),
        run(20, 31.0, busy=True),
        run(20, 61.0, form=EAGER),
    ):
        history.note(session(each))
    saved = (20 * 30 + 10 * 20 - 5 * 20) / 1000
    assert history.saved_today() == {"seconds": saved, "runs": 3}
    assert History(tmp_path, clock=lambda: now[0]).saved_today()["runs"] == 3


def test_a_day_of_many_runs_is_told_whole_and_few_of_them_one_by_one(tmp_path: Path) -> None:
    history = History(tmp_path)
    for _ in range(2 * TOLD + 12):
        history.note(session(run(batch=1)))
    assert len(history.runs()) == TOLD
    assert history.saved_today()["runs"] == History(tmp_path).saved_today()["runs"] == 212


def _compared(history: History) -> tuple[list[tuple[str, ...]], list[str]]:
    """What the comparison of two prompts says: an image, its factor and the sentence of each."""
    told = comparison(history.compared("with", "without"))
    steps = [(each["size"], each["times"], each["said"]["text"]) for each in told["steps"]]
    return steps, told["notes"]


def test_a_comparison_is_of_the_two_prompts_own_runs(tmp_path: Path) -> None:
    """Other prompts' runs of the same image lie before, between and after them."""
    history = History(tmp_path)

    def note(prompt: str | None, *runs: TimedRun) -> None:
        for each in runs:
            history.note(session(each), prompt)

    small = {"size": "512x512", "batch": 1}
    plain = {"form": EAGER, "eager_ms": None}
    note("other", run(20, 9.0), run(20, 99.0, **plain))
    note("with", run(20, 30.0), run(20, 10.0, **small), run(8, 32.0))
    note(None, run(20, 9.0), run(20, 99.0, **plain))
    assert _compared(history) == ([], ["no_step"])
    note("without", run(20, 60.0, **plain), run(20, 10.2, **plain, **small), run(8, 28.0, **plain))
    note("later", run(20, 99.0, **plain))
    for each in (history, History(tmp_path)):
        assert _compared(each) == (
            [
                ("1024x1024", "2.0", "2.0x faster: 30 ms a step instead of 60 ms"),
                ("512x512", "1.0", "about as fast: 10 ms a step, 10 ms without"),
                ("1024x1024", "0.9", "0.9x, slower here: 32 ms a step instead of 28 ms"),
            ],
            [],
        )


@pytest.mark.parametrize(
    ("first", "second", "notes"),
    [
        ({"ms": None}, {}, ["no_step"]),
        ({}, {"ms": None}, ["no_step"]),
        ({}, {"size": "512x512"}, ["no_step"]),
        ({"busy": True}, {}, ["busy"]),
        ({}, {"busy": True}, ["busy"]),
        ({"form": EAGER}, {}, ["partly"]),
    ],
)
def test_runs_that_are_not_alike_are_not_compared(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], notes: list[str]
) -> None:
    history = History(tmp_path)
    history.note(session(run(**first)), "with")
    history.note(session(run(**{"form": EAGER, **second})), "without")
    assert _compared(history) == ([], notes)


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
        ("at", None),
        ("batch", True),
        ("model", "x" * 300),
        ("form", "magic"),
        ("busy", 1),
        ("prompt", 7),
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
