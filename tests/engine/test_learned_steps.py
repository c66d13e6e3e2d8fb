"""Steps of made-up models that nobody described: watched, learned, compared, and watched again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from warmgraph_backends.graphs.learned_models import MOST_STEPS
from warmgraph_backends.runtime.verification import Verification
from warmgraph_tools.inprocess import Host

from . import learned_models
from .lab import Lab
from .learned import CALLS
from .learned_steps import Steps


@pytest.fixture(scope="module")
def models(host: Host) -> Iterator[Any]:
    yield learned_models.load(learned_models.SOURCE + SOURCE)
    learned_models.unload()


#: What a comparison of results alone cannot see.
SOURCE = """

class MarksBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        vec.note = 2.0
        return x + self.mix(x, vec, transformer_options)


class Marks(Model):
    block = MarksBlock

    def run(self, h, vec, options):
        return super().run(h, vec, options) * getattr(vec, "note", 1.0)


class Looks(Model):
    def run(self, h, vec, options):
        h = super().run(h, vec, options)
        return h * (1.01 if "forward" in vars(self.blocks[0]) else 1.0)
"""


@pytest.mark.parametrize("name", ["Model", "InPlace", "Indexed"])
def test_what_was_learned_serves_calls_of_all_sizes(
    learned_steps: Callable[[str], Steps], name: str
) -> None:
    made = learned_steps(name)
    assert [made.run(), made.run()] == [(0, 0.0)] * 2  # watched, and compared
    for sizes in CALLS:
        calls, far = made.served(sizes)
        assert calls == 2 and far < 1e-5
    assert made.here.jobs == 1 and made.reasons() == set()


def test_verify_compares_every_call_of_a_learned_block_too(
    learned_steps: Callable[[str], Steps], own_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    verification = Verification()
    shared = replace(own_lab.engine._shared, verification=verification)
    monkeypatch.setattr(own_lab.engine, "_shared", shared)
    made = learned_steps("Model")
    made.run()  # watched
    for _ in range(4):
        assert made.run() == (0, 0.0)
    line = verification.take()
    assert line is not None
    assert line.startswith("verified 8 calls of regions with eager: none differs"), line
    assert made.reasons() == set()


def test_between_a_blocks_call_and_its_graph_are_four_functions_of_ours(
    learned_steps: Callable[[str], Steps],
) -> None:
    made = learned_steps("Model")
    made.run()
    made.run()
    [graph], found = made.scope.graphs, set()
    status = graph.status
    assert status.loaded is not None
    compute = status.loaded.call

    def counted(values: Any) -> Any:
        names, frame = [], sys._getframe(1)
        while frame.f_code.co_name != "_call_impl":
            names.append(frame.f_code.co_name)
            assert frame.f_back is not None
            frame = frame.f_back
        found.add(tuple(names))
        return compute(values)

    graph.status = status._replace(loaded=status.loaded._replace(call=counted))
    assert made.run()[0] == 2
    assert found == {("_compute", "__call__", "serve", "forward")}


def test_a_way_serves_once_its_first_call_was_compared(
    learned_steps: Callable[[str], Steps],
) -> None:
    made = learned_steps("Sizes")
    assert made.run() == (0, 0.0)
    found = [made.run(sizes) for sizes in (CALLS[0], CALLS[0], CALLS[4], CALLS[4], CALLS[0])]
    assert [calls for calls, _ in found] == [0, 2, 0, 2, 2]
    assert max(far for _, far in found) < 1e-5 and found[0][1] == found[2][1] == 0.0
    assert made.here.jobs == 1 and made.reasons() == set()


@pytest.mark.parametrize(
    ("name", "key"),
    [("Counts", "learned_settings"), ("Random", "learned_random"), ("Reads", "learned_reads_data")],
)
def test_a_model_of_which_nothing_is_learned_is_the_hosts_and_is_watched_once(
    learned_steps: Callable[[str], Steps], name: str, key: str
) -> None:
    """Also by the next server: it is kept."""
    made = learned_steps(name)
    made.run()
    made.run(CALLS[1])
    made.run()
    assert made.here.jobs == 1 and made.scope.compiled_calls == 0
    [reason] = {reason for _, reason in made.scope.eager_places()}
    assert key in {reason.cause.key, getattr(reason.cause.values.get("why"), "key", "")}
    again = learned_steps(name)
    again.run()
    assert again.here.jobs == 0


def test_a_call_that_differs_is_watched_again_a_few_times(
    learned_steps: Callable[[str], Steps],
) -> None:
    made = learned_steps("Option")
    made.run()
    assert made.served()[0] == 2
    made.run(strength=2.0)  # declined
    assert made.here.jobs == 1
    made.run(strength=2.0)  # watched
    assert made.here.jobs == 2
    for options in ({}, {"strength": 2.0}, {}):
        calls, far = made.served(CALLS[1], **options)
        assert calls == 2 and far < 1e-5
    for strength in (3.0, 4.0, 5.0, 6.0, 7.0, 8.0):
        for _ in range(2):
            assert made.run(strength=strength)[1] < 1e-5
    assert made.here.jobs == MOST_STEPS
    assert made.served()[0] == 2
    again = learned_steps("Option")  # as the next server finds it
    assert again.served()[0] == 2 and again.here.jobs == 0


def test_a_number_that_differs_from_step_to_step_is_no_other_way(
    learned_steps: Callable[[str], Steps], models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learned_steps("Number")
    made.run()
    assert made.served()[0] == 2
    for number in (0.6, 0.7, 0.8, 0.9, 1.0, 1.1):
        monkeypatch.setattr(models, "STATE", [number])
        for _ in range(2):
            assert made.run() == (0, 0.0)
    assert made.here.jobs == MOST_STEPS and len(made.scope.plan.places) == 2
    monkeypatch.setattr(models, "STATE", [0.5])
    assert made.served()[0] == 2


def test_a_model_that_looks_at_its_blocks_forwards_is_refused(
    learned_steps: Callable[[str], Steps],
) -> None:
    """It gives something else where they are ours, though each block is right by itself."""
    made = learned_steps("Looks")
    made.run()  # which is watched, so that it looks otherwise
    for sizes in CALLS:
        assert made.run(sizes) == (0, 0.0)
    assert made.here.jobs == 1
    [reason] = {reason for _, reason in made.scope.eager_places()}
    assert reason.cause.values["why"].key == "learned_looks"


def test_a_mark_on_a_tensor_is_seen(learned_steps: Callable[[str], Steps]) -> None:
    made = learned_steps("Marks")
    for sizes in CALLS:
        assert made.run(sizes) == (0, 0.0)
    assert made.scope.compiled_calls == 0
