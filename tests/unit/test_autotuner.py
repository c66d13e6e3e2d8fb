"""Which of several ways is taken: the quickest, as it was timed once and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.choices import autotuner
from warmgraph_backends.choices.autotuner import HOST, Autotuner, quickest

MACHINE = "card/torch"
FILE = "ways.json"


class Card:
    """A GPU that takes these milliseconds; notes what was timed and what was computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: Mapping[str, float]) -> None:
        self.times = times
        self.timed: list[set[str]] = []
        self.ran: list[str] = []
        self.is_capturing = False
        monkeypatch.setattr(autotuner, "by_turns", self._by_turns)
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing, raising=False
        )

    def _by_turns(self, runs: Mapping[str, Any], **_: Any) -> dict[str, float]:
        self.timed.append(set(runs))
        return {name: self.times[name] for name in runs if name in self.times}

    def run(self, chooser: Autotuner, *others: str, size_class: str = "class") -> str:
        """Compute once; returns which way was taken."""

        def way(name: str) -> Callable[[], torch.Tensor]:
            def compute() -> torch.Tensor:
                self.ran.append(name)
                if name == "refusing":
                    raise RuntimeError("not these sizes")
                return torch.zeros(())

            return compute

        runs = {name: way(name) for name in (HOST, *others)}
        chooser.run(
            (size_class, others),
            lambda: size_class,
            runs,
            must_save_ms=dict.fromkeys(others, 0.005),
        )
        return self.ran[-1]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch, {HOST: 1.0, "apart": 0.7, "ours": 0.5, "refusing": 0.1})


@pytest.mark.parametrize(
    ("times", "there", "taken"),
    [
        ({"host": 1.0, "apart": 0.7, "ours": 0.5}, ("apart", "ours"), "ours"),
        ({"host": 1.0, "apart": 0.4, "ours": 0.5}, ("apart", "ours"), "apart"),
        ({"host": 1.0, "apart": 0.7, "ours": 0.5}, ("apart",), "apart"),  # ours is not there now
        ({"host": 0.504, "apart": 0.7, "ours": 0.5}, ("apart", "ours"), "host"),  # no more than
        ({"host": 1.0, "ours": 0.5}, ("apart", "ours"), "ours"),  # one was refused
        ({"host": 1.0}, ("apart", "ours"), "host"),
        ({"apart": 0.1}, ("apart", "ours"), "host"),
        ({}, ("apart",), "host"),
    ],
)
def test_the_quickest_is_taken_if_it_saves_enough(
    times: dict[str, float], there: tuple[str, ...], taken: str
) -> None:
    assert quickest(times, (HOST, *there), dict.fromkeys(there, 0.005)) == taken


def test_all_are_timed_together_and_kept(card: Card, tmp_path: Path) -> None:
    chooser = Autotuner(tmp_path / FILE, MACHINE, ("apart", "ours"))
    assert [card.run(chooser, "apart", "ours") for _ in range(2)] == ["ours"] * 2
    assert card.timed == [{HOST, "apart", "ours"}]
    again = Autotuner(tmp_path / FILE, MACHINE, ("apart", "ours"))
    assert card.run(again, "apart", "ours") == "ours" and len(card.timed) == 1


def test_one_that_comes_later_is_timed_with_the_others_then(card: Card, tmp_path: Path) -> None:
    """The name of a class says which ways it has."""
    chooser = Autotuner(tmp_path / FILE, MACHINE, ("apart", "ours"))
    assert card.run(chooser, "apart") == "apart"
    card.is_capturing = True  # nothing is timed meanwhile
    assert card.run(chooser, "apart", "ours", size_class="class ours") == HOST
    card.is_capturing = False
    assert card.run(chooser, "apart", "ours", size_class="class ours") == "ours"
    assert card.run(chooser, "apart") == "apart"
    assert card.timed == [{HOST, "apart"}, {HOST, "apart", "ours"}]


def test_what_was_written_before_is_read(card: Card, tmp_path: Path) -> None:
    """By a version with two ways, or by one with other ones; a broken class is timed anew."""
    old = {"class": {"host": 1.0, "apart": 0.7}, "other": {"host": 1.0, "apart": 0.7, "new": 0.1}}
    old |= {"broken": {"apart": 0.7}}
    (tmp_path / FILE).write_text(json.dumps({MACHINE: old, "another card": {}}))
    chooser = Autotuner(tmp_path / FILE, MACHINE, ("apart", "ours"))
    assert card.run(chooser, "apart") == "apart"
    assert card.run(chooser, "apart", size_class="other") == "apart" and not card.timed
    assert card.run(chooser, "apart", size_class="broken") == "apart" and len(card.timed) == 1
    assert json.loads((tmp_path / FILE).read_text())[MACHINE]["class"] == old["class"]


def test_one_that_refuses_sizes_of_its_class_leaves_them_to_the_host(
    card: Card, tmp_path: Path
) -> None:
    chooser = Autotuner(tmp_path / FILE, MACHINE, ("refusing", "ours"))
    assert card.run(chooser, "refusing", "ours") == HOST
    assert card.run(chooser, "refusing", "ours") == HOST
    assert card.ran == ["refusing", HOST, HOST]
