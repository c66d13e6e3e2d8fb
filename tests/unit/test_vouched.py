"""What of other nodes' attention is captured on a user's word: what keeps no tensor of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.cuda_graphs.vouched import MAX_WATCHED, NONE, Vouched
from warmgraph_backends.host_api.options import ATTENTION

ATTEND = torch.nn.functional.scaled_dot_product_attention


class Attends:
    """Attention as packs write it; what it leaves behind is for the ones that follow it."""

    def __init__(self) -> None:
        self.calls = 0
        self.left: Any = None
        self.table = torch.ones(8)

    def __call__(self, function: Any, q: Any, k: Any, v: Any, heads: int, **named: Any) -> Any:
        self.calls += 1
        return self.leave(function(q, k, v), q, named)

    def leave(self, result: Any, q: Any, named: Any) -> Any:
        return result


class KeepsWhatItGets(Attends):
    def leave(self, result: Any, q: Any, named: Any) -> Any:
        self.left = q[:1]
        return result


class KeepsWhatItGives(Attends):
    def leave(self, result: Any, q: Any, named: Any) -> Any:
        self.left = result
        return result


class KeepsWhatItMakes(Attends):
    def leave(self, result: Any, q: Any, named: Any) -> Any:
        self.left = {"mean": [result.mean(dim=-1)]}
        return result


class KeepsWhatItHad(Attends):
    """A view of a table of its own, what was computed into it, and the mask of all steps."""

    def leave(self, result: Any, q: Any, named: Any) -> Any:
        self.left = self.table.view(2, 4), self.table.mul_(2), named.get("mask"), self.calls
        return result


def _step(options: dict[str, Any]) -> torch.Tensor:
    """As a model: it attends by its options, and keeps nothing."""
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    attended: torch.Tensor = options[ATTENTION](ATTEND, q, k, v, 2, mask=options["mask"])
    return attended + 1


def _arguments(function: Any) -> tuple[Any, ...]:
    return torch.ones(1), {ATTENTION: function, "mask": torch.ones(4)}


def _watched(vouched: Vouched, function: Any) -> Any:
    """What becomes of it once a step was watched, and of the arguments' own meanwhile."""
    values = _arguments(function)
    found = vouched.look(values)
    assert found.function is None and found.problem is None and found.watch is not None
    with found.watch:
        _step(values[1])
    assert values[1][ATTENTION] is function
    return vouched.look(values)


def _on() -> Vouched:
    made = Vouched(lambda: True)
    assert made.begin_run(), "it was off"
    return made


@pytest.mark.parametrize("make", [Attends, KeepsWhatItHad])
def test_what_keeps_no_tensor_of_a_step_is_captured(make: Callable[[], Any]) -> None:
    vouched, function = _on(), make()
    assert _watched(vouched, function) == (function, None, None) and function.calls == 1
    assert not vouched.begin_run() and vouched.look(_arguments(function)).function is function


@pytest.mark.parametrize("make", [KeepsWhatItGets, KeepsWhatItGives, KeepsWhatItMakes])
def test_what_keeps_one_is_not_and_says_why(make: Callable[[], Any]) -> None:
    vouched, function = _on(), make()
    found = _watched(vouched, function)
    assert found.function is None and "keeps tensors of a step" in found.problem
    assert _watched(vouched, Attends()).problem is None, "and no other is taken for it"


def test_a_step_that_fails_tells_nothing() -> None:
    vouched, function = _on(), Attends()
    values = _arguments(function)
    watch = vouched.look(values).watch
    assert watch is not None
    with pytest.raises(RuntimeError, match="cancelled"), watch:
        raise RuntimeError("cancelled")
    assert values[1][ATTENTION] is function
    assert vouched.look(values).watch is not None


def test_one_that_is_made_anew_at_each_step_is_left_after_a_few() -> None:
    vouched = _on()
    for _ in range(MAX_WATCHED):
        _watched(vouched, Attends())
    found = vouched.look(_arguments(Attends()))
    assert found.problem is not None and "anew at each step" in found.problem
    vouched.begin_run()
    assert vouched.look(_arguments(Attends())).watch is not None


def test_nothing_is_watched_without_a_word_or_where_the_code_tells_enough() -> None:
    says = [False]
    vouched = Vouched(lambda: says[0])
    function = Attends()
    assert not vouched.begin_run() and vouched.look(_arguments(function)) == NONE
    says[0] = True
    assert vouched.look(_arguments(function)) == NONE, "from the next run on"
    assert vouched.begin_run() and vouched.look(_arguments(function)).watch is not None
    for plain in (None, torch.nn.functional.scaled_dot_product_attention):
        assert vouched.look(_arguments(plain)) == NONE
