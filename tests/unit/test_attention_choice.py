"""Which kernel attention runs with: chosen by times, which are kept; without a GPU there is nothing
to choose.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.choices import attention_choice, autotuner, exact_attention
from warmgraph_backends.choices.attention_choice import (
    FILE_NAME,
    LEAST_MS,
    AttentionChoice,
    must_save_ms,
)
from warmgraph_backends.choices.exact_attention import CUDNN

MACHINE = "card/torch"
#: A class's first result of a kernel is compared with the host's.
COMPARED = "host"


@pytest.mark.parametrize(
    ("times", "calls", "chosen"),
    [
        ({"host": 0.8, "cudnn": 0.4}, 1, "cudnn"),
        ({"host": 0.45, "cudnn": 0.42}, 60, "cudnn"),  # of SDXL: little, in many blocks
        ({"host": 0.45, "cudnn": 0.42}, 4, "host"),  # its plan would not be earned back
        ({"host": 0.401, "cudnn": 0.4}, 1000, "host"),  # no more than times differ
        ({"host": 0.4, "cudnn": 0.8}, 60, "host"),
        ({"host": 60.0}, 60, "host"),  # refused by this card
        ({}, 60, "host"),
    ],
)
def test_the_kernel_is_chosen_that_saves_enough_in_a_few_images(
    times: dict[str, float], calls: int, chosen: str
) -> None:
    least = must_save_ms(calls, CUDNN)
    assert autotuner.quickest(times, ("host", "cudnn"), {"cudnn": least}) == chosen
    assert least >= LEAST_MS


class Card:
    """A GPU that takes these milliseconds, and what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
        self.times = times
        self.timed = 0
        self.calls: list[str] = []
        self.refuses = False
        self.is_capturing = False
        monkeypatch.setattr(attention_choice, "_is_open", lambda query: True)
        monkeypatch.setattr(attention_choice, "_major", lambda device: 9)
        monkeypatch.setattr(autotuner, "by_turns", self._time)
        monkeypatch.setattr(exact_attention, "_cudnn", self._cudnn)
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing, raising=False
        )

    def _time(self, runs: Any, *, are_short: bool) -> dict[str, float]:
        assert set(runs) == {"host", "cudnn"} and not are_short
        self.timed += 1
        return self.times

    def _cudnn(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.calls.append("cudnn")
        if self.refuses:
            raise RuntimeError("no plan for these sizes")
        return query.transpose(1, 2).flatten(2)

    def attend(
        self,
        choice: AttentionChoice,
        rows: int = 2048,
        heads: int = 2,
        *,
        keys: int | None = None,
        calls: int = 1,
    ) -> torch.Tensor:
        query = torch.zeros(1, rows, heads * 64, dtype=torch.bfloat16)
        key = torch.zeros(1, keys or rows, heads * 64, dtype=torch.bfloat16)

        def host() -> torch.Tensor:
            self.calls.append("host")
            return query

        found = choice.attend(query, key, key, heads, split=False, calls=calls, host=host)
        assert found.shape == query.shape
        return found


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch, {"host": 1.0, "cudnn": 0.5})


def test_a_class_of_sizes_is_timed_once_and_remembered_by_the_next_process(
    card: Card, tmp_path: Path
) -> None:
    choice = AttentionChoice(tmp_path, MACHINE)
    card.attend(choice)
    card.attend(choice, 2080)  # of the same class
    assert card.timed == 1 and card.calls == ["cudnn", COMPARED, "cudnn"]
    card.attend(AttentionChoice(tmp_path, MACHINE))
    assert card.timed == 1
    card.attend(AttentionChoice(tmp_path, "another card"))
    assert card.timed == 2
    card.attend(choice, 8192)
    assert card.timed == 3


def test_what_many_blocks_save_little_by_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card = Card(monkeypatch, {"host": 0.45, "cudnn": 0.42})
    card.attend(AttentionChoice(tmp_path, MACHINE), calls=4)
    card.attend(AttentionChoice(tmp_path, MACHINE), calls=60)
    assert card.timed == 1 and card.calls == ["host", "cudnn", COMPARED]


def test_short_and_unequal_attentions_are_the_hosts_unasked(card: Card, tmp_path: Path) -> None:
    choice = AttentionChoice(tmp_path, MACHINE)
    card.attend(choice, 512)
    wide = torch.zeros(1, 4096, 2 * 512, dtype=torch.bfloat16)
    choice.attend(wide, wide, wide, 2, split=False, calls=1, host=lambda: wide)
    assert card.timed == 0 and card.calls == ["host"]


def test_nothing_is_timed_while_a_call_is_captured(card: Card, tmp_path: Path) -> None:
    choice = AttentionChoice(tmp_path, MACHINE)
    card.is_capturing = True
    card.attend(choice)
    card.is_capturing = False
    card.attend(choice)
    assert card.timed == 1 and card.calls == ["host", "cudnn", COMPARED]


def test_sizes_that_a_kernel_refuses_are_the_hosts_from_then_on(card: Card, tmp_path: Path) -> None:
    choice = AttentionChoice(tmp_path, MACHINE)
    card.refuses = True
    card.attend(choice)
    card.attend(choice)
    assert card.calls == ["cudnn", "host", "host"]


def test_out_of_memory_while_timing_decides_nothing(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(runs: Any, **_: Any) -> Any:
        raise torch.OutOfMemoryError("no room for two results")

    choice = AttentionChoice(tmp_path, MACHINE)
    monkeypatch.setattr(autotuner, "by_turns", full)
    card.attend(choice)
    monkeypatch.setattr(autotuner, "by_turns", card._time)
    card.attend(choice)
    assert card.calls == ["host", "cudnn", COMPARED]


@pytest.mark.parametrize("text", ["", "[1]", '{"card/torch": 3}', '{"card/torch": {"a": ["b"]}}'])
def test_a_broken_file_is_made_anew(card: Card, tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    card.attend(AttentionChoice(tmp_path, MACHINE))
    kept = json.loads((tmp_path / FILE_NAME).read_text())
    assert list(kept[MACHINE].values()) == [{"host": 1.0, "cudnn": 0.5}]


def test_without_a_gpu_there_is_no_choice(tmp_path: Path) -> None:
    query = torch.zeros(1, 2048, 64, dtype=torch.bfloat16)
    choice = AttentionChoice(tmp_path, MACHINE)
    assert choice.attend(query, query, query, 1, split=False, calls=1, host=lambda: query) is query
    assert not (tmp_path / FILE_NAME).exists()


def test_another_pytorchs_operator_is_a_kernel_that_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)

    class Operator:
        @staticmethod
        def default(query: torch.Tensor) -> tuple[torch.Tensor]:
            return (query,)

    monkeypatch.setattr(
        torch.ops.aten, "_scaled_dot_product_cudnn_attention", Operator, raising=False
    )
    with pytest.raises(RuntimeError, match="not the known one"):
        exact_attention._cudnn(query, query, query)
