"""What eager steps took stands after a restart, for the same model under the same conditions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warmgraph_backends.runtime.gains import Figure, Gain
from warmgraph_backends.runtime.pace import FEWEST_CALLS, Times
from warmgraph_backends.sessions import eager_times as room
from warmgraph_backends.sessions.eager_times import FILE_NAME, KEPT, EagerTimes

SIZE = ((2, 4, 8, 8),)


@pytest.fixture(autouse=True)
def flags(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options that the server was started with."""
    given = ["--cpu"]
    monkeypatch.setattr(room, "host_flags", lambda: given)
    return given


def attached(root: torch.nn.Module, name: str = "SDXL", dtype: torch.dtype = torch.float16) -> Any:
    placement = SimpleNamespace(device=torch.device("cpu"), dtype=dtype)
    return SimpleNamespace(root=root, name=name, placement=lambda: placement)


def measure(times: Times, milliseconds: float) -> None:
    run = object()
    for _ in range(FEWEST_CALLS):
        times.add(SIZE, milliseconds, run)


def test_they_survive_a_restart_and_new_ones_take_their_place(tmp_path: Path) -> None:
    root = torch.nn.Linear(4, 4)
    before = EagerTimes(tmp_path, "gpu")
    assert before.of(attached(root)).figure(SIZE) is None
    measure(before.of(attached(root)), 61.0)
    before.keep(root)
    again, same = EagerTimes(tmp_path, "gpu"), torch.nn.Linear(4, 4)
    times = again.of(attached(same))
    assert times.figure(SIZE) == Figure(61.0)
    measure(times, 70.0)
    again.keep(same)
    assert EagerTimes(tmp_path, "gpu").of(attached(root)).figure(SIZE) == Figure(70.0)


def test_what_steps_gain_survives_a_restart(tmp_path: Path) -> None:
    root = torch.nn.Linear(4, 4)
    before = EagerTimes(tmp_path, "gpu")
    measure(before.of(attached(root)), 61.0)
    before.keep(root)
    other = ((2, 4, 16, 16),)
    for size, gain in ((SIZE, Gain(3.0, "64x64", 0.2)), (other, Gain(2.0, "128x128"))):
        before.of(attached(root)).gains.note(size, gain)
    before.keep(root)
    again = EagerTimes(tmp_path, "gpu").of(attached(torch.nn.Linear(4, 4)))
    assert again.gains.all() == {SIZE: Gain(3.0, "64x64", 0.2)}  # of the other nothing was measured
    assert again.gains.nearest(other) == Gain(3.0, "64x64", 0.2)


def test_quickest_times_as_they_once_were_kept_are_compared_with_nothing(tmp_path: Path) -> None:
    root = torch.nn.Linear(4, 4)
    before = EagerTimes(tmp_path, "gpu")
    measure(before.of(attached(root)), 61.0)
    before.keep(root)
    plain = json.loads((tmp_path / FILE_NAME).read_text())
    assert [[len(entry) for entry in entries] for entries in plain.values()] == [[3]]
    for old in ([SIZE, 61.0], [SIZE, 61.0, 3.0, "64x64"]):
        (tmp_path / FILE_NAME).write_text(json.dumps({name: [old] for name in plain}))
        assert EagerTimes(tmp_path, "gpu").of(attached(root)).figure(SIZE) is None


def test_another_machine_model_size_dtype_or_start_has_its_own(
    tmp_path: Path, flags: list[str]
) -> None:
    root = torch.nn.Linear(4, 4)
    before = EagerTimes(tmp_path, "gpu")
    measure(before.of(attached(root)), 61.0)
    before.keep(root)

    def known(machine: str, each: Any) -> float | None:
        found = EagerTimes(tmp_path, machine).of(each).figure(SIZE)
        return None if found is None else found.ms

    assert known("gpu", attached(torch.nn.Linear(4, 4))) == 61.0
    assert known("another gpu", attached(torch.nn.Linear(4, 4))) is None
    assert known("gpu", attached(torch.nn.Linear(4, 4), "SD1.5")) is None
    assert known("gpu", attached(torch.nn.Linear(4, 5))) is None
    assert known("gpu", attached(torch.nn.Linear(4, 4), dtype=torch.float32)) is None
    flags.append("--use-sage-attention")
    assert known("gpu", attached(torch.nn.Linear(4, 4))) is None


def test_nothing_is_written_without_news_and_few_models_are_kept(tmp_path: Path) -> None:
    times = EagerTimes(tmp_path, "gpu")
    root = torch.nn.Linear(4, 4)
    times.of(attached(root))
    times.keep(root)
    assert not (tmp_path / FILE_NAME).exists()
    for width in range(1, KEPT + 4):
        root = torch.nn.Linear(1, width)
        measure(times.of(attached(root)), 1.0)
        times.keep(root)
    (tmp_path / FILE_NAME).touch()
    assert len(json.loads((tmp_path / FILE_NAME).read_text())) == KEPT
    then = (tmp_path / FILE_NAME).stat().st_mtime_ns
    times.keep(root)
    assert (tmp_path / FILE_NAME).stat().st_mtime_ns == then


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"a": 1}',
        '{"a": [[1, 2.0]]}',
        '{"a": [[[[1]], -2.0, 0.0]]}',
        "[" * 9999,
        '{"a": [[[[1]], 2.0, 0.1, 0.0, "64x64", 0.0]]}',
    ],
)
def test_a_file_that_is_not_as_it_was_written_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    times = EagerTimes(tmp_path, "gpu")
    root = torch.nn.Linear(4, 4)
    measure(times.of(attached(root)), 2.0)
    times.keep(root)
    times = EagerTimes(tmp_path, "gpu").of(attached(torch.nn.Linear(4, 4)))
    assert times.figure(SIZE) == Figure(2.0)
