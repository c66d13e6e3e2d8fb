"""A graph's life: asked for, looked for, loaded or built and kept, until the process ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.building.contract import BuildResult, Job
from warmgraph_backends.errors import BuildError, CancelledBuildError
from warmgraph_backends.graphs.compiled_graph import State, manifest_of
from warmgraph_backends.reasons import Reason
from warmgraph_backends.storing.graph_file import encode, file_name
from warmgraph_backends.storing.manifest import read_facts
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.target import keys

from .. import saved
from ..remotes import Machine
from .places import Place


def test_a_store_that_cannot_be_written_is_told_before_anything_is_built(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path)
    kept = place.graph(channels=8)
    place.folder.mkdir()
    (place.folder / f".{file_name(kept.key)}").write_bytes(place.file(kept, channels=8))
    (tmp_path / "store").write_text("a file where a folder should be")
    told: list[str | None] = []
    answer = place.builder.answer

    def look(job: Job) -> BuildResult:
        told.append(place.graphs.unkept)
        (tmp_path / "store").unlink(missing_ok=True)
        return answer(job)

    place.builder.answer = look
    try:
        assert place.ask(kept, build=True).state is State.READY and not told
        assert place.graphs.unkept is None and not caplog.text, "nothing need be written"
        assert place.ask(build=True).state is State.READY
        assert told[0] is not None and "cannot be written" in told[0]
        assert caplog.text.count("is not kept on disk") == 1
        assert place.graphs.unkept is None, "it was written after all"
    finally:
        place.graphs.close()


def test_a_store_that_cannot_be_written_is_told_before_anything_is_fetched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path / "machine", (tmp_path / "bucket").as_uri())
    (tmp_path / "store").write_text("a file where a folder should be")
    place = Place(tmp_path, machine.remote)
    try:
        assert place.ask().state is State.MISSING
        assert place.graphs.unkept is not None and "cannot be written" in place.graphs.unkept
        assert caplog.text.count("is not kept on disk") == 1
    finally:
        place.graphs.close()
        machine.remote.close()


def test_what_is_no_folder_explains_nothing_and_stops_nothing(place: Place, tmp_path: Path) -> None:
    place.folder.write_text("a file in the way")
    place.graphs.request([place.wanted], [place.folder, tmp_path / "none"], build=False)
    place.graphs.settle()
    assert (place.wanted.state, place.wanted.reason) == (State.MISSING, "no compiled graph")


def test_a_file_that_is_evicted_while_it_loads_serves_all_the_same(place: Place) -> None:
    path = saved.put_at(place.store.root / file_name(place.wanted.key), place.file(place.wanted))
    load = place.backend.load

    def evict_meanwhile(payload: bytes, card: int) -> Any:
        path.unlink()
        return load(payload, card)

    place.backend.load = evict_meanwhile
    assert place.ask().state is State.READY


def test_a_graph_is_awaited_until_its_file_is_in_the_store(place: Place) -> None:
    """Not until its build is done: loading and keeping it comes afterwards, in another thread."""
    looked, go_on = threading.Event(), threading.Event()
    load = place.backend.load

    def slow(payload: Any, card: int) -> Any:
        looked.set()
        assert go_on.wait(60)
        return load(payload, card)

    place.backend.load = slow
    assert place.graphs.awaited() == 0
    place.graphs.request([place.wanted], [place.folder], build=True)
    assert looked.wait(60) and len(place.builder.jobs) == 1
    assert (place.graphs.awaited(), place.store.usage().files) == (1, 0)
    go_on.set()
    for _ in range(3):
        place.graphs.settle()
    assert (place.graphs.awaited(), place.store.usage().files) == (0, 1)


class TwoCards(saved.Counting):
    """Notes the cards on which payloads are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.cards: list[int | None] = []

    def load(self, payload: bytes, card: int | None = None) -> Callable[[list[Any]], Any]:
        self.cards.append(card)
        return super().load(payload, card)


@pytest.mark.parametrize("has_file", [False, True])
def test_two_cards_share_a_graphs_file_and_build_and_each_loads_it(
    place: Place, has_file: bool
) -> None:
    place.backend = TwoCards()
    place.graphs._graphs.clear()
    kind, target = saved.description(), keys.target("cpu", place.backend)
    first, second = (place.graphs.graph(kind, place.backend, target, card) for card in (0, 1))
    assert first is not second and first.key == second.key and (first.card, second.card) == (0, 1)
    assert place.graphs.graph(kind, place.backend, target, 1) is second
    if has_file:
        place.ask(first, build=True)
        place.ask(second, build=False)
        assert second.source == "loaded"
    else:  # both are on their way before the build has come to its end
        pending: Future[BuildResult] = Future()
        place.builder.submit = lambda job: place.builder.jobs.append(job) or pending
        place.ask(first, build=True)
        place.ask(second, build=True)
        assert [first.state, second.state] == [State.BUILDING] * 2
        pending.set_result(place.builder.answer(place.builder.jobs[0]))
        for _ in range(3):
            place.graphs.settle()
        assert second.source == "built"
    assert [first.state, second.state] == [State.READY] * 2 and first.source == "built"
    assert len(place.builder.jobs) == 1 and place.graphs.builds == 1
    assert place.builder.jobs[0].task["card"] == 0 and place.backend.cards == [0, 1]
    assert place.store.usage().files == 1
    second.drop(Reason.plain("it differs"))
    assert (first.state, second.state) == (State.READY, State.FAILED)


def test_a_graph_that_is_looked_for_again_keeps_its_reason_until_the_look_has_ended(
    place: Place,
) -> None:
    """Each run looks again for what is missing: a report during one says what is known."""
    looked, go_on = threading.Event(), threading.Event()
    assert place.ask().reason == "no compiled graph" and place.wanted.is_missed

    def hold() -> None:
        looked.set()
        go_on.wait(60)

    place.graphs.when_loaded(hold)
    assert looked.wait(60)
    place.graphs.request([place.wanted], [place.folder], build=False)
    assert place.wanted.is_missed and place.wanted.is_pending
    assert place.wanted.reason == "no compiled graph"
    go_on.set()
    place.graphs.settle()
    assert place.wanted.is_missed and not place.wanted.is_pending
    place.graphs.request([place.wanted], [place.folder], build=True)
    assert place.wanted.reason is None and not place.wanted.is_missed
    assert place.ask().state is State.READY


@pytest.mark.parametrize("when", ["it waits", "it looks"])
def test_a_folder_that_is_named_while_a_graph_is_looked_for_is_looked_into_as_well(
    place: Place, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """One node of a prompt has it looked for in the store, the next one in a folder."""
    place.folder.mkdir()
    (place.folder / file_name(place.wanted.key, hidden=True)).write_bytes(place.file(place.wanted))
    began, go_on = threading.Event(), threading.Event()
    load = place.store.load

    def slow(*arguments: Any) -> Any:
        found = load(*arguments)
        began.set()
        assert go_on.wait(60)
        return found

    def hold() -> None:
        began.set()
        go_on.wait(60)

    if when == "it waits":
        place.graphs.when_loaded(hold)
    else:
        monkeypatch.setattr(place.store, "load", slow)
    place.graphs.request([place.wanted], [], build=False)
    assert began.wait(60)
    place.graphs.request([place.wanted], [place.folder], build=False)
    go_on.set()
    place.graphs.settle()
    assert place.wanted.state is State.READY


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (CancelledBuildError(), "compiling it was cancelled"),
        (BuildError("it is too large"), "compiling failed: it is too large"),
        (None, "a worker's result is not as it must be: work"),
    ],
    ids=["cancelled", "failed", "wrong"],
)
def test_an_advice_goes_with_the_reason_that_it_was_given_for(
    place: Place, tmp_path: Path, error: BuildError | None, words: str
) -> None:
    """A file that nobody trusts here is built anew; what becomes of that is another matter."""
    signer = Signer(tmp_path / "theirs")
    manifest = {**manifest_of(place.wanted, read_facts(saved.facts()), 4.2)}
    data = encode(manifest, saved.packed(), signer)
    saved.put_at(place.folder / file_name(place.wanted.key, hidden=True), data)

    def answer(job: Job) -> BuildResult:
        graph = place.wanted
        assert "trust" in graph.remedy and graph.refused is not None
        if error is not None:
            raise error
        return BuildResult(job.key, saved.packed(), {**saved.facts(), "work": "much"}, 4.2)

    place.builder.answer = answer
    graph = place.ask(build=True)
    assert (graph.reason or "").startswith(words) and graph.remedy == ""
    graph.drop("it differs from eager")
    assert (graph.reason, graph.remedy) == ("it differs from eager", "")


def test_closing_leaves_no_graph_between_states(place: Place) -> None:
    gate = threading.Event()
    place.graphs.when_loaded(lambda: gate.wait(20))
    loading, building = place.wanted, place.graph(channels=8)
    later: list[Future[BuildResult]] = []

    def submit(job: Job) -> Future[BuildResult]:
        later.append(Future())
        return later[0]

    place.builder.submit = submit
    gate.set()
    place.ask(building, build=True)
    assert building.state is State.BUILDING
    gate.clear()
    place.graphs.when_loaded(lambda: gate.wait(20))
    place.graphs.request([loading], [], build=True)
    place.graphs.close()
    gate.set()
    later[0].set_exception(BuildError("Warmgraph was closed before this was compiled"))
    assert (loading.state, building.state) == (State.MISSING, State.MISSING)
    assert loading.reason
    assert building.reason
    place.graphs.request([loading], [], build=True)  # a prompt that is still on its way
    assert loading.state is State.MISSING
