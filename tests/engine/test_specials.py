"""Graphs for the very sizes of a hot call: asked for, used for those calls only, kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from warmgraph_backends.compilers import eager
from warmgraph_backends.contract import Description, InputSpec, Symbol
from warmgraph_backends.cuda_graphs.replays import Replays
from warmgraph_backends.graphs.graph import Graph, Loaded, Outcome, State
from warmgraph_backends.runtime import specials as specials_module
from warmgraph_backends.runtime.specials import (
    MAX_ELEMENTS,
    MAX_KNOWN,
    MAX_SETS,
    STALE_RUNS,
    Specials,
)
from warmgraph_backends.sessions import start as starting
from warmgraph_tools.inprocess import Host

from .lab import Lab
from .probed import Probed

SIZE = (12, 8)


def _special_calls(model: Probed) -> int:
    calls: int = model.model.get_attachment("warmgraph").scope.forwards.special_calls
    return calls


@pytest.mark.slow
def test_a_hot_size_gets_graphs_of_its_own_and_keeps_them(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab()
    model = Probed(lab, host, form="specialised")
    model.check(size=SIZE)
    assert not model.report()["misses"]
    model.sample(size=SIZE)  # the next run asks for them, and is not held up
    session = model.model.get_attachment("warmgraph")
    special = session.scope.special_graphs
    assert len(special) >= len(session.graphs)
    lab.wait_until(lambda: not any(graph.is_pending for graph in special))
    assert [graph.reason for graph in special if graph.state.value != "ready"] == []

    model.check(size=SIZE, batch=1)
    places = model.report()["regions"]["total"]
    assert _special_calls(model) == places * len(model.probe.calls)
    before = _special_calls(model)
    model.check(size=(13, 8))
    assert _special_calls(model) == before

    again = Probed(lab.copy_to(lab.root.with_name("restarted")), host, form="specialised")
    for _ in range(2):
        again.check(size=SIZE)
    again.lab.settle()
    again.check(size=SIZE)
    assert _special_calls(again) > 0 and again.lab.builds() == 0
    again.lab.engine.close()


def test_without_being_asked_for_no_size_is_special(probed: Probed) -> None:
    for _ in range(3):
        probed.check(size=SIZE)
    assert probed.model.get_attachment("warmgraph").scope.special_graphs == []


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where hot sizes get graphs of their own by themselves."""
    monkeypatch.setattr(starting, "_special_pays", lambda attached: True)


def test_warm_up_makes_no_size_hot(
    lab: Lab, host: Host, pays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Probed(lab, host).model
    scope = model.get_attachment("warmgraph").scope
    scope.replays = Replays(
        lab.engine._captured, lab.engine._shared.comparisons
    )  # several calls a size
    lab.settle()
    asked: list[Any] = []
    monkeypatch.setattr(
        lab.engine._graphs, "request", lambda graphs, *_, **__: asked.extend(graphs)
    )
    lab.engine.warm_up(model, [(64 + 8 * n, 64) for n in range(8)], [1])
    assert not any(graph.description.is_special for graph in asked)
    assert scope.specials.counts and not scope.specials._sets


def test_graphs_that_nobody_builds_are_looked_for_once_and_are_no_misses(
    make_lab: Callable[..., Lab], host: Host, pays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_lab()
    model = Probed(lab, host, when_missing="never")
    lab.settle()
    looked: list[str] = []
    explain = lab.engine._graphs._explain_missing

    def look(graph: Any, folders: Any) -> str:
        looked.append(graph.description.label)
        return explain(graph, folders)

    monkeypatch.setattr(lab.engine._graphs, "_explain_missing", look)
    for _ in range(7):
        model.sample(size=SIZE)
        lab.settle()
    special = model.model.get_attachment("warmgraph").scope.special_graphs
    assert sorted(looked) == sorted(graph.description.label for graph in special) != []
    assert model.report()["misses"] == []


def test_a_set_that_is_let_go_leaves_nothing_behind(
    lab: Lab, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.engine._graphs, "request", lambda *_, **__: None)
    model = Probed(lab, host, form="specialised", when_missing="never")
    scope = model.model.get_attachment("warmgraph").scope
    monkeypatch.setattr(specials_module, "STALE_RUNS", 0)
    known = []
    for n in range(9):
        model.sample(size=(8 + n, 8))
        scope.begin_run()
        known.append((len(scope.specials._sets), len(lab.engine._graphs._graphs)))
    assert known[-1][0] == MAX_SETS
    grown = [graphs for sets, graphs in known if sets == MAX_SETS]
    assert max(grown) - grown[0] <= 2, known  # kinds that only some of the sizes share


DESCRIPTION = Description(
    "made-up",
    "form",
    "Layer",
    {"modules": []},
    (InputSpec("x", "float32", ("batch", 4, "height")), InputSpec("out", "int", ("out",))),
    (Symbol("batch", 1, 64, 2), Symbol("height", 1, 1024, 72), Symbol("out", 1, 1024, 143)),
)


def _any_shape(work: float = 1.0) -> Any:
    graph = Graph("key", DESCRIPTION, eager.Eager())
    graph.outcome = Outcome(State.READY, loaded=Loaded(print, work=work))
    return graph


def _call(specials: Specials, key: Any, height: int) -> None:
    if specials.see(key):
        record, recorded = specials.record(key)
        record("layer", _Nothing())(torch.zeros(2, 4, height), 2 * height)
        recorded()


class _Nothing:
    def __call__(self, *inputs: Any) -> torch.Tensor | None:
        return None

    def decline(self, reason: str) -> torch.Tensor | None:
        return None


def test_a_set_is_described_by_the_sizes_of_its_call() -> None:
    specials, made = Specials(lambda: 2), []
    assert specials.begin_run() == []
    for run in range(2):
        _call(specials, "a", 24)
        assert specials.begin_run() == (["a"] if run else [])
    specials.add("a", lambda _: _any_shape(), made.append)  # type: ignore[arg-type]
    assert specials.begin_run() == []
    [special] = made
    assert special.is_special and not DESCRIPTION.is_special
    assert {s.name: (s.minimum, s.maximum, s.example) for s in special.symbols} == {
        "batch": (2, 2, 2),
        "height": (24, 24, 24),
        "out": (48, 48, 48),
    }
    assert special.label == "Layer at batch 2, height 24, out 48"
    assert Description.from_dict(special.to_dict()) == special


def test_few_sizes_get_sets_and_few_are_remembered() -> None:
    specials = Specials(lambda: 1)
    for height in range(1, 2 * MAX_KNOWN):
        _call(specials, height, height)
    due = specials.begin_run()
    assert len(due) == MAX_SETS
    for key in due:
        specials.add(key, lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
    for height in range(1, 2 * MAX_KNOWN):
        _call(specials, height, height)
    assert specials.graphs == []
    assert len(specials._sizes) <= MAX_KNOWN


def _hot(specials: Specials, heights: Iterable[int], *, runs: int = 1) -> list[Any]:
    """Make runs over these sizes and the sets that they ask for; returns those of the last run."""
    due: list[Any] = []
    for _ in range(runs):
        for height in heights:
            _call(specials, height, height)
        due = specials.begin_run()
        for key in due:
            specials.add(key, lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
    return due


def test_a_set_that_nobody_used_for_long_makes_room_for_a_hotter_size() -> None:
    specials = Specials(lambda: 2)
    _hot(specials, range(1, MAX_SETS + 1), runs=2)
    assert specials._sets.keys() == set(range(1, MAX_SETS + 1))
    hotter = range(2, MAX_SETS + 2)  # all but the first, and a new one
    assert not any(_hot(specials, hotter) for _ in range(STALE_RUNS))
    assert _hot(specials, hotter) == [MAX_SETS + 1]
    assert specials._sets.keys() == set(hotter)
    _call(specials, 1, 1)
    assert specials.begin_run() == [], "what was let go must become hot anew"


def test_more_hot_sizes_than_sets_do_not_take_turns() -> None:
    specials = Specials(lambda: 2)
    _hot(specials, range(6), runs=2)
    first = set(specials._sets)
    assert len(first) == MAX_SETS
    assert not any(_hot(specials, range(6)) for _ in range(40))
    assert set(specials._sets) == first


def test_graphs_of_a_set_that_was_let_go_are_named_unless_another_set_has_them() -> None:
    specials, made = Specials(lambda: 1), {}

    def special(description: Description) -> Any:
        return made.setdefault(description.label, Graph("key", description, eager.Eager()))

    def run(*heights: int) -> Any:
        for height in heights:
            _call(specials, (height, "a"), height)
        lost = [specials.add(key, lambda _: _any_shape(), special) for key in specials.begin_run()]
        return [item for item in lost if item]

    assert run(1, 2, 3, 4) == [] and len(specials.graphs) == MAX_SETS
    for _ in range(STALE_RUNS + 1):
        assert run(2, 3, 4) == []
    [(key, graphs)] = run(5)
    assert key == (1, "a") and [graph.description.symbols[1].minimum for graph in graphs] == [1]


def test_a_call_that_was_replayed_or_broken_off_records_nothing() -> None:
    specials = Specials(lambda: 1)
    assert specials.see("replayed")
    specials.record("replayed")[1]()
    assert specials.see("broken")
    specials.record("broken")[0]("layer", _Nothing())(torch.zeros(2, 4, 8), 16)
    assert specials.begin_run() == []
    assert specials.see("replayed") and specials.see("broken"), "their sizes are still to come"


def test_calls_that_do_not_count_leave_nothing() -> None:
    specials = Specials(lambda: 1)
    specials.counts = False
    for height in range(1000):
        _call(specials, height, height)
    assert specials.begin_run() == [] and not specials._sizes
    specials.counts = True
    for height in range(1000):
        assert specials.see(height)  # nothing is recorded where nothing is installed
        specials.begin_run()
    assert not specials._runs and not specials._last_seen


def test_a_place_with_large_tensors_keeps_its_any_shape_graph() -> None:
    specials, made = Specials(lambda: 1), []
    _call(specials, "a", 24)
    specials.begin_run()
    work = MAX_ELEMENTS / (2 * 4 * 24) + 1
    specials.add("a", lambda _: _any_shape(work), made.append)  # type: ignore[arg-type]
    assert made == [] and specials.graphs == []


def test_never_means_that_nothing_is_recorded() -> None:
    specials = Specials(lambda: None)
    assert not specials.see("a") and specials.begin_run() == []
