"""Graphs for the very sizes of a hot call: asked for, used for those calls only, kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends import eager
from warmgraph_backends.contract import Description, InputSpec, Symbol
from warmgraph_backends.runtime.graphs import Graph
from warmgraph_backends.runtime.specials import MAX_ELEMENTS, MAX_KNOWN, MAX_SETS, Specials
from warmgraph_tools.inprocess import Host

from .lab import Lab
from .probed import Probed

SIZE = (12, 8)


def _special_calls(model: Probed) -> int:
    scope = model.model.get_attachment("warmgraph").scope
    return sum(either.special.calls for either in scope._special_regions.values())


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
    graph.work = work
    return graph


def _call(specials: Specials, key: Any, height: int) -> None:
    if specials.see(key):
        specials.record(key)("layer", _Nothing())(torch.zeros(2, 4, height), 2 * height)


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


def test_the_set_that_was_used_longest_ago_makes_room_for_a_hotter_size() -> None:
    specials = Specials(lambda: 2)
    for _ in range(2):
        for height in range(1, MAX_SETS + 1):
            _call(specials, height, height)
        due = specials.begin_run()
    for key in due:
        specials.add(key, lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
    for _ in range(2):
        for height in range(2, MAX_SETS + 2):  # all but the first, and a new one
            _call(specials, height, height)
        due = specials.begin_run()
    assert due == [MAX_SETS + 1]
    specials.add(due[0], lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
    assert specials._sets.keys() == set(range(2, MAX_SETS + 2))
    _call(specials, 1, 1)
    assert specials.begin_run() == [], "what was let go must become hot anew"


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
