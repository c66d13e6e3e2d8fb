"""What is noticed of a block's attributes between two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.learning import blocks
from warmgraph_backends.learning.blocks import ReadAttributes
from warmgraph_backends.torch_api.dicts import version_of


class Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.flag, self.names = 1.0, True, ["a"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain if self.flag and self.names and hasattr(self, "other") else x


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 2.0
        self.part, self.last = Part(), torch.nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.part(x * self.gain))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "its own": lambda block: setattr(block, "gain", 3.0),
    "within": lambda block: setattr(block.part, "gain", 3.0),
    "of another sort": lambda block: setattr(block.part, "flag", 1),
    "past the module's own way": lambda block: object.__setattr__(block.part, "gain", -1.0),
    "in the dictionary": lambda block: vars(block.part).update(gain=0.5),
    "gone": lambda block: vars(block.part).pop("gain"),
    "come": lambda block: setattr(block.part, "other", 1),
    "in a list": lambda block: block.part.names.append("b"),
    "of one of torch's layers": lambda block: setattr(block.last, "eps", 1e-3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("is_told", [True, False])
def test_each_change_is_noticed_at_the_next_call_and_until_it_is_undone(
    change: Callable[[Any], Any], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_told:  # a torch without the name
        monkeypatch.setattr(blocks, "version_of", lambda _: object())
    block = Block()
    read = ReadAttributes(block)
    assert [read.have_changed() for _ in range(3)] == [False] * 3
    before = {part: dict(vars(part)) for part in block.modules()}
    change(block)
    assert [read.have_changed() for _ in range(3)] == [True] * 3
    block.part.names[:] = ["a"]
    for part, attributes in before.items():
        vars(part).clear()
        vars(part).update(attributes)
    assert not read.have_changed()


def test_what_is_set_to_an_equal_value_is_no_change() -> None:
    block = Block()
    read = ReadAttributes(block)
    block.part.gain, block.part.forward = float("1.0"), block.part.forward
    assert not read.have_changed()


def test_this_torch_tells_the_versions_of_dictionaries() -> None:
    some = {"a": 1}
    assert version_of(some) == version_of(some)
