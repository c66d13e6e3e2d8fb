"""When a call is captured, captured anew, or left as it is. Stand-ins take the place of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends.cuda_graphs import capture_table, replay_check, replays
from warmgraph_backends.cuda_graphs.capture_table import CLEAN_CALLS
from warmgraph_backends.cuda_graphs.memory import CapturedMemory, CardMemory
from warmgraph_backends.cuda_graphs.replays import Replays
from warmgraph_backends.cuda_graphs.signatures import CaptureError, read_call, run_steps
from warmgraph_backends.reasons import of
from warmgraph_tools.inprocess import Host


class _Weights:
    """Weights that never move; what the host brings over within a capture is told to `undo`."""

    problem = None
    device = torch.device("cpu")
    epoch = 0

    def __init__(self) -> None:
        self.undone = 0

    def look(self) -> Any:
        return "anchor"

    def hold(self, addresses: Any) -> bool:
        return True

    def let_go(self, addresses: Any) -> None:
        pass

    def marks(self) -> list[Any]:
        return []

    def undo(self, marks: list[Any]) -> None:
        self.undone += 1

    def settle(self) -> None:
        pass


class _Graph:
    """Stands for a CUDA graph: it computes as it would, and can be told to find no room."""

    device = torch.device("cpu")
    room = True
    tries = 0
    regions = 0
    own_bytes = 0
    #: What it gives more than it should.
    wrong_by = 0.0

    def __init__(self, *_: Any) -> None:
        self.freed = False

    def prepare(self, *_: Any) -> None: ...

    def capture(self, *_: Any) -> None:
        type(self).tries += 1
        if not self.room:
            raise CaptureError(of("no_memory_capturing"))

    def fits(self, addresses: Any) -> bool:
        return True

    def replay(self, addresses: Any, tensors: Any) -> Any:
        assert not self.freed
        return tensors[0] + 1 + self.wrong_by

    def free(self) -> list[Any]:
        self.freed = True
        return []


class _Card:
    """What marks on a GPU say: how long a call took, and whether it has yet to come to its end."""

    seconds, is_behind = 0.1, False


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> _Card:
    made = _Card()
    monkeypatch.setattr(replays.gpu, "mark", lambda device: "a mark")
    monkeypatch.setattr(replays.gpu, "is_passed", lambda mark: not made.is_behind)
    monkeypatch.setattr(replays.gpu, "seconds_between", lambda begin, end: made.seconds)
    return made


@pytest.fixture
def memory(host: Host) -> CapturedMemory:
    return CapturedMemory(lambda _: 2**40, lambda _: None)


@pytest.fixture
def steps(memory: CapturedMemory, monkeypatch: pytest.MonkeyPatch) -> tuple[Replays, _Weights, Any]:
    """Captured calls without a GPU: the object, its weights, and a step in a form."""
    monkeypatch.setattr(replays, "CapturedCall", _Graph)
    monkeypatch.setattr(replays.driver, "free_bytes", lambda _: 2**40)
    monkeypatch.setattr(replays.driver, "reserved_bytes", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(_Graph, "room", True)
    monkeypatch.setattr(_Graph, "tries", 0)
    monkeypatch.setattr(_Graph, "wrong_by", 0.0)
    made, weights = Replays(memory), _Weights()

    def step(
        form: str,
        *,
        complete: bool = True,
        rows: int = 2,
        steps: int | None = None,
    ) -> Any:
        """Returns in which form the call was captured, None where it was made."""
        sigmas = {} if steps is None else {"sample_sigmas": torch.ones(steps + 1)}
        call = read_call((torch.zeros(rows, 4), sigmas), {}, frozenset(("sample_sigmas",)))
        attempt = made.attempt(
            lambda x, _: x + 1,
            call,
            book=weights,  # type: ignore[arg-type]
            form=form,
            complete=complete,
            runner=lambda run, compiled=True: run(),
            steps=run_steps(call.args, call.kwargs),
        )
        result = attempt.result
        if result is None:
            result = torch.zeros(rows, 4) + 1
            made.settle(attempt, weights, result, True)  # type: ignore[arg-type]
        assert torch.equal(result, torch.ones(rows, 4))
        return attempt.form

    return made, weights, step


@pytest.mark.parametrize("wrong_by", [0.1, float("nan")])
def test_a_capture_that_gives_something_else_is_not_replayed(
    steps: tuple[Replays, _Weights, Any], monkeypatch: pytest.MonkeyPatch, wrong_by: float
) -> None:
    """It is tried once more in the next run; `step` sees that no result is the wrong one."""
    made, _, step = steps
    monkeypatch.setattr(_Graph, "wrong_by", wrong_by)
    for _ in range(2):
        made.begin_run()
        assert [step("compiled") for _ in range(6)] == [None] * 6
    assert _Graph.tries == 2 and (made.captures, made.replayed) == (0, 0)
    (reason,) = made.reasons
    assert "differs by" in str(reason) and made.captured == 0
    monkeypatch.setattr(_Graph, "wrong_by", 0.0)
    made.begin_run()
    assert [step("compiled") for _ in range(4)][-1] == "compiled" and made.replayed > 0


def test_of_a_large_call_nothing_is_kept_and_it_is_made_once_more(
    steps: tuple[Replays, _Weights, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, step = steps
    monkeypatch.setattr(replay_check, "MOST_BYTES", 0)
    assert [step("compiled") for _ in range(CLEAN_CALLS)] == [None] * CLEAN_CALLS
    assert [known.check for known in made._table.values()] == [None]
    assert step("compiled") == "compiled", "and it is proved all the same"
    made.drop()
    monkeypatch.setattr(_Graph, "wrong_by", 0.1)
    assert [step("compiled") for _ in range(CLEAN_CALLS + 2)] == [None] * (CLEAN_CALLS + 2)


def test_where_weights_changed_in_place_between_two_calls_the_captured_one_is_made(
    steps: tuple[Replays, _Weights, Any],
) -> None:
    made, _, step = steps
    assert [step("compiled") for _ in range(CLEAN_CALLS)] == [None] * CLEAN_CALLS
    (known,) = made._table.values()
    assert known.check is not None
    known.check.results = [torch.full((2, 4), 5.0)]
    assert step("compiled") == "compiled" and known.refused is None


def test_a_better_form_takes_the_place_of_one_only_once_it_is_there(
    steps: tuple[Replays, _Weights, Any], card: _Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What PyTorch frees with the last graph of a card would be the new one's, too."""
    made, _, step = steps
    held: list[int] = []
    drop = CardMemory.drop

    def watched(card: CardMemory, graph: Any) -> None:
        held.append(len(card._owners))
        drop(card, graph)

    monkeypatch.setattr(CardMemory, "drop", watched)
    for _ in range(CLEAN_CALLS + 2):
        step("compiled", complete=False)
    assert held == []
    for _ in range(CLEAN_CALLS + 2):
        step("compiled")
    assert held == [2] and made.captured == 1 and made.captures == 2


def test_a_call_of_an_earlier_run_proves_nothing(
    steps: tuple[Replays, _Weights, Any],
) -> None:
    """Its weights may have been others: the call that is captured is made first."""
    made, weights, step = steps
    ran: list[int] = []
    for number in range(CLEAN_CALLS + 2):  # runs of one step
        weights.epoch = number
        made.begin_run()
        ran.append(step("compiled") is not None)
        made.end_run()
        assert all(known.check is None for known in made._table.values())
    assert ran == [False] * CLEAN_CALLS + [True] * 2 and _Graph.tries == 1


def test_a_better_form_that_finds_no_room_leaves_the_one_that_is_there(
    steps: tuple[Replays, _Weights, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, weights, step = steps
    monkeypatch.setattr(replays.gpu, "mark", lambda device: "a mark")
    monkeypatch.setattr(replays.gpu, "is_passed", lambda mark: True)
    monkeypatch.setattr(replays.gpu, "seconds_between", lambda begin, end: 0.1)
    forms = [step("compiled", complete=False) for _ in range(CLEAN_CALLS + 2)]
    assert forms == [None] * CLEAN_CALLS + [replays.EXACT] * 2
    assert (made.captures, made.replayed) == (1, 2)
    monkeypatch.setattr(_Graph, "room", False)
    for _ in range(CLEAN_CALLS + 1):
        step("compiled")
    assert _Graph.tries == 2 and weights.undone == 1 and made.captured == 1
    assert step("compiled") == replays.EXACT, "by the graph that is there"
    assert made.replayed == 3

    monkeypatch.setattr(_Graph, "room", True)
    made.begin_run()
    for _ in range(CLEAN_CALLS + 2):
        step("compiled")
    assert (made.captures, made.captured) == (2, 1)


def test_a_captured_call_ends_with_a_graph_in_it_that_was_dropped(
    steps: tuple[Replays, _Weights, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, step = steps
    for _ in range(CLEAN_CALLS + 1):
        step("compiled")
    monkeypatch.setattr(_Graph, "room", False)  # nothing better can be captured meanwhile
    for _ in range(CLEAN_CALLS + 3):
        step("one graph less")
    assert made.replayed == 1, "what was captured holds the graph"


def test_what_made_room_for_another_call_is_captured_anew_once_it_comes_often(
    steps: tuple[Replays, _Weights, Any], memory: CapturedMemory
) -> None:
    made, _, step = steps
    for _ in range(CLEAN_CALLS + 1):
        step("compiled")
    (card,) = memory._cards.values()
    (graph,) = card._owners
    card.drop(graph, crowded=True)
    for _ in range(replays._BACK_OFF + CLEAN_CALLS):
        step("compiled")
    assert made.captures == 1
    step("compiled")
    assert made.captures == 2


def test_a_call_that_the_run_will_make_often_is_captured_after_one(
    steps: tuple[Replays, _Weights, Any],
) -> None:
    made, _, step = steps
    step("compiled", steps=20)
    step("compiled", steps=20)
    assert made.captures == 0, "the first calls of all do what is done once"
    step("compiled", steps=20)
    assert made.captures == 1
    made.begin_run()
    for rows in (3, 4, 3, 4):  # two prompts of unequal length
        step("compiled", rows=rows, steps=8)
    assert made.captures == 3 and made.replayed == 3
    made.begin_run()
    for _ in range(CLEAN_CALLS):
        step("compiled", rows=5, steps=capture_table.STEPS_LEFT)
    assert made.captures == 3, "too few are left"
    made.begin_run()
    for _ in range(CLEAN_CALLS):
        step("compiled", rows=6)
    assert made.captures == 3, "nobody says how many"


def test_a_first_call_that_took_long_is_not_the_last_word(
    steps: tuple[Replays, _Weights, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, step = steps
    for _ in range(CLEAN_CALLS + 1):
        step("compiled")
    made._limit_s = lambda: 0.5
    times = iter((2.9, 0.1))
    monkeypatch.setattr(replays.gpu, "mark", lambda device: "a mark")
    monkeypatch.setattr(replays.gpu, "is_passed", lambda mark: True)
    monkeypatch.setattr(replays.gpu, "seconds_between", lambda begin, end: next(times))
    made.begin_run()
    for _ in range(CLEAN_CALLS + 1):
        step("compiled", rows=3, steps=20)
    assert made.captures == 2 and not made.reasons


def test_cancel_while_a_call_is_captured_ends_the_prompt(
    steps: tuple[Replays, _Weights, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from comfy.model_management import InterruptProcessingException

    made, weights, step = steps

    def cancelled(self: Any, *_: Any) -> None:
        raise InterruptProcessingException

    monkeypatch.setattr(_Graph, "capture", cancelled)
    for _ in range(CLEAN_CALLS):
        step("compiled")
    with pytest.raises(InterruptProcessingException):
        step("compiled")
    assert weights.undone == 1 and made.captured == 0


def test_cancel_before_a_replay_ends_the_prompt_and_leaves_what_is_captured(
    steps: tuple[Replays, _Weights, Any],
) -> None:
    from comfy.model_management import (
        InterruptProcessingException,
        interrupt_current_processing,
    )

    made, weights, step = steps
    for _ in range(CLEAN_CALLS + 1):
        step("compiled")
    before = made.replayed, made.captured
    interrupt_current_processing(True)
    with pytest.raises(InterruptProcessingException):
        step("compiled")
    assert (made.replayed, made.captured) == before == (1, 1) and weights.undone == 0
    step("compiled")
    assert made.replayed == 2


def test_a_call_that_takes_long_is_not_captured(
    steps: tuple[Replays, _Weights, Any], card: _Card
) -> None:
    made, _, step = steps
    card.seconds = 2.9
    made._limit_s = lambda: 0.5
    for _ in range(CLEAN_CALLS + 3):
        step("compiled")
    assert _Graph.tries == 0 and made.captured == 0
    (reason,) = made.reasons
    assert reason == "one call takes 2.9 s, of which replaying it would save nothing"
    card.seconds = 0.1
    for _ in range(CLEAN_CALLS + 2):
        step("one graph more")
    assert made.captured == 1


def test_a_run_beside_another_program_does_not_keep_later_ones_from_being_captured(
    steps: tuple[Replays, _Weights, Any], card: _Card
) -> None:
    made, _, step = steps
    card.seconds = 2.9
    made._limit_s = lambda: 0.5
    for _ in range(CLEAN_CALLS + 2):
        step("compiled")
    card.seconds = 0.1
    step("compiled")
    assert made.captured == 0, "within a run the first answer holds"
    made.begin_run()
    for _ in range(2):
        step("compiled")
    assert made.captured == 1, "once a call of this run was quick"


def test_while_graphs_are_made_only_what_waits_for_the_processor_is_captured(
    steps: tuple[Replays, _Weights, Any], card: _Card
) -> None:
    made, _, step = steps
    card.is_behind = True
    for _ in range(CLEAN_CALLS + 3):
        step("compiled", complete=False)
    assert _Graph.tries == 0
    (reason,) = made.reasons
    assert reason.startswith("compiled graphs are on their way")
    for _ in range(CLEAN_CALLS + 2):
        step("compiled")
    assert (made.captures, made.captured) == (1, 1), "the compiled call, whatever waits for what"

    card.is_behind = False
    made.drop()
    for _ in range(CLEAN_CALLS + 2):
        step("compiled", complete=False)
    assert (made.captures, made.replayed) == (2, 4)


def test_the_signature_that_is_used_is_not_the_first_to_be_forgotten(
    steps: tuple[Replays, _Weights, Any],
) -> None:
    made, _, _ = steps
    hot = made._find("hot")
    for other in range(2 * replays.MAX_SIGNATURES):
        made._find(other)
        assert made._find("hot") is hot
