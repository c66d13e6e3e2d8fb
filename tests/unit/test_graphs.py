"""Graphs of a process: whatever lies in the folders or comes from a worker, none stays between
states, and what others left there stops no good one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.building.claims import Claims
from warmgraph_backends.building.worker_thread import BuildResult, Job, WorkerError
from warmgraph_backends.errors import BuildError, CancelledBuildError, GraphFileError
from warmgraph_backends.events import Events
from warmgraph_backends.graphs.graph import Graph, State, manifest_of
from warmgraph_backends.graphs.library import Graphs
from warmgraph_backends.reasons import Reason
from warmgraph_backends.storing.graph_file import encode, file_name
from warmgraph_backends.storing.manifest import read_facts
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.storing.store import Store
from warmgraph_backends.target import keys

from . import saved
from .remotes import Machine

DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]


class Answering:
    """A builder (`submit(job) -> Future`) that answers as a test says."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.answer: Callable[[Job], BuildResult] = lambda job: BuildResult(
            job.key, saved.packed(), saved.facts(), 4.2
        )
        self.error: BaseException | None = None

    def submit(self, job: Job) -> Future[BuildResult]:
        if self.error is not None:
            raise self.error
        self.jobs.append(job)
        future: Future[BuildResult] = Future()
        try:
            future.set_result(self.answer(job))
        except BaseException as error:
            future.set_exception(error)
        return future


class Place:
    """Graphs over a store and a folder of a workflow's, with one graph that is asked for."""

    def __init__(self, root: Path, remote: Any = None) -> None:
        private = root / "private"
        self.signer = Signer(private)
        self.store = Store(root / "store", self.signer, cap_bytes=lambda: 1 << 30, private=private)
        self.folder = root / "w.graphs"
        self.builder: Any = Answering()
        self.backend: Any = saved.Counting()
        claims = Claims(self.store.root, self.signer, patience_s=lambda: 60.0)
        self.graphs = Graphs(self.store, self.builder, claims, Events(), remote=remote)
        self.wanted = self.graph()

    def graph(self, **changes: Any) -> Graph:
        kind = saved.description(**changes)
        return self.graphs.graph(kind, self.backend, keys.target("cpu", self.backend))

    def file(self, graph: Graph, *, channels: int = 4) -> bytes:
        """The bytes of a good file of a graph."""
        manifest = manifest_of(graph, read_facts(saved.facts(channels)), 4.2)
        return encode(manifest, saved.packed(), self.signer)

    def ask(self, graph: Graph | None = None, *, build: bool = False) -> Graph:
        graph = graph or self.wanted
        self.graphs.request([graph], [self.folder], build=build)
        for _ in range(3):  # a build's answer is taken in the loader's thread as well
            self.graphs.settle()
        return graph


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.graphs.close()


@pytest.fixture(autouse=True)
def nothing_escapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    escaped: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", escaped.append)
    yield
    assert escaped == []


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of a manifest: the value at a dotted path."""

    def change(manifest: dict[str, Any]) -> None:
        *way, last = path.split(".")
        part: Any = manifest
        for name in way:
            part = part[int(name) if isinstance(part, list) else name]
        part[int(last) if isinstance(part, list) else last] = value

    return change


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


ODD: dict[str, tuple[str, Any]] = {
    "a list where the target's dict should be": ("target", ["torch"]),
    "a target of mixed names": ("target", {"torch": DEEP}),
    "a number as the structure": ("structure", 3),
    "sources that are a list": ("structure.sources", ["a", "b"]),
    "sources that are text": ("structure.sources", "abc"),
    "a float out of range in the inputs": ("inputs", [float("inf")]),
    "a lone surrogate in the target": ("target.torch", "2.11\ud800"),
    "a lone surrogate as a name": ("structure.sources", {"\udcff": "ab"}),
    "deep nesting": ("structure.module", DEEP),
    "a null target": ("target", None),
}


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("where", ["store", "folder"])
def test_an_odd_neighbour_is_skipped(place: Place, where: str, odd: str, signed: bool) -> None:
    other = place.graph(channels=8)
    data = saved.changed(place.file(other), put(*ODD[odd]), place.signer if signed else None)
    name = file_name(other.key, hidden=where == "folder")
    saved.put_at((place.folder if where == "folder" else place.store.root) / name, data)
    graph = place.ask()
    assert graph.state is State.MISSING
    assert graph.reason == "no compiled file"
    good = place.file(graph)
    saved.put_at(place.store.root / file_name(graph.key), good)
    assert place.ask().state is State.READY


def test_a_good_neighbour_still_explains_a_miss_beside_an_odd_one(place: Place) -> None:
    other = place.graph(channels=8)
    odd = saved.changed(place.file(other), put("target", []), place.signer)
    saved.put_at(place.store.root / file_name("0" * 64), odd)
    saved.put_at(place.store.root / file_name(other.key), place.file(other, channels=8))
    assert "its inputs differ" in (place.ask().reason or "")


def test_what_is_no_folder_explains_nothing_and_stops_nothing(place: Place, tmp_path: Path) -> None:
    place.folder.write_text("a file in the way")
    place.graphs.request([place.wanted], [place.folder, tmp_path / "none"], build=False)
    place.graphs.settle()
    assert (place.wanted.state, place.wanted.reason) == (State.MISSING, "no compiled file")


def test_a_file_that_is_evicted_while_it_loads_serves_all_the_same(place: Place) -> None:
    path = saved.put_at(place.store.root / file_name(place.wanted.key), place.file(place.wanted))
    load = place.backend.load

    def evict_meanwhile(payload: bytes, card: int) -> Any:
        path.unlink()
        return load(payload, card)

    place.backend.load = evict_meanwhile
    assert place.ask().state is State.READY


#: What the reason says, and what was changed.
ODD_FILES: dict[str, tuple[str, Any]] = {
    "weights": ("weights", 5),
    "weights[0]": ("weights.0", None),
    "name proj.other": ("weights.0.0", "proj.other"),
    "weights[1][1]": ("weights.1.1", [4.0]),
    "its region does not have": ("weights.0.2", "load"),
    "work": ("work", "much"),
    "NaN": ("work", float("nan")),
    "Infinity": ("binary_bytes", 1e400),
    "built": ("built", []),
    "built.seconds": ("built.seconds", {}),
    "kind": ("kind", ["ResBlock"]),
    "has format True": ("format", True),
    "has format 1.0": ("format", 1.0),
    "checks": ("checks", {"sizes": 1}),
    "-Infinity": ("checks.0.error", float("-inf")),
    "integer of 31 characters": ("symbols.0.minimum", 10**30),
    "symbols[0].minimum": ("symbols.0.minimum", -1),
    "payload": ("payload", []),
    "payload.sha256": ("payload.sha256", 7),
    "signer": ("signer", "65b8bb36\n"),
    "target": ("target", {"torch": "\ud800"}),
}


@pytest.mark.parametrize("build", [False, True], ids=["load only", "build"])
@pytest.mark.parametrize("words", ODD_FILES)
def test_a_graphs_own_odd_file_is_refused_by_its_field_and_built_anew(
    place: Place, words: str, build: bool
) -> None:
    data = saved.changed(place.file(place.wanted), put(*ODD_FILES[words]), place.signer)
    saved.put_at(place.store.root / file_name(place.wanted.key), data)
    graph = place.ask(build=build)
    assert graph.state is (State.READY if build else State.MISSING)
    if build:
        assert (graph.source, len(place.builder.jobs)) == ("built", 1)
        assert place.store.read(place.store.root / file_name(graph.key)).payload == saved.PAYLOAD
    else:
        assert place.backend.loaded == []
        assert words in (graph.reason or "")
        assert graph.refused is not None


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), SystemExit(3), MemoryError()])
@pytest.mark.parametrize("build", [False, True])
def test_a_file_that_fails_to_load_in_any_way_leaves_no_graph_between_states(
    place: Place, error: BaseException, build: bool
) -> None:
    saved.put_at(place.store.root / file_name(place.wanted.key), place.file(place.wanted))
    place.backend.error = error
    graph = place.ask(build=build)
    assert graph.state is (State.FAILED if build else State.MISSING)
    assert graph.reason
    place.backend.error = None
    assert place.ask(build=build).state is State.READY


def test_a_builder_that_takes_no_job_fails_the_graph_in_words(place: Place) -> None:
    place.builder.error = RuntimeError("can't start new thread")
    graph = place.ask(build=True)
    assert graph.state is State.FAILED
    assert "can't start new thread" in (graph.reason or "")


WRONG: dict[str, Any] = {
    "no facts": {},
    "facts that are a list": [],
    "weights": {**saved.facts(), "weights": [["proj.weight", "44", "float32"]]},
    "unknown weight": {**saved.facts(), "weights": [["no.such", [4], "float32"]]},
    "work": {**saved.facts(), "work": None},
    "infinite work": {**saved.facts(), "work": float("inf")},
    "error": {**saved.facts(), "checks": [{"sizes": {}, "error": float("nan")}]},
    "binary bytes": {**saved.facts(), "binary_bytes": "many"},
    "phases": {**saved.facts(), "phases": [1]},
    "a surrogate": {**saved.facts(), "phases": {"\ud800": 1.0}},
    "a deep one": {**saved.facts(), "checks": DEEP},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_facts_of_a_worker_fail_the_graph_in_words(place: Place, wrong: str) -> None:
    place.builder.answer = lambda job: BuildResult(job.key, saved.packed(), WRONG[wrong], 1.0)
    graph = place.ask(build=True)
    assert graph.state is State.FAILED
    assert graph.reason
    assert place.backend.loaded == []
    assert list(place.store.root.glob("*")) == []  # nor is a claim left


@pytest.mark.parametrize(
    "seconds", [float("nan"), -1.0, "soon", 10**400], ids=["nan", "negative", "text", "huge"]
)
def test_wrong_seconds_of_a_worker_fail_the_graph_in_words(place: Place, seconds: Any) -> None:
    place.builder.answer = lambda job: BuildResult(job.key, saved.packed(), saved.facts(), seconds)
    graph = place.ask(build=True)
    assert graph.state is State.FAILED
    assert "seconds" in (graph.reason or "")


def test_a_payload_that_unpacks_to_more_than_it_says_fails_the_graph(place: Place) -> None:
    bomb = saved.packed(bytes(1 << 20))._replace(raw_bytes=100)
    place.builder.answer = lambda job: BuildResult(job.key, bomb, saved.facts(), 1.0)
    assert place.ask(build=True).state is State.FAILED
    assert place.backend.loaded == []


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
    assert place.ask().reason == "no compiled file" and place.wanted.is_missed

    def hold() -> None:
        looked.set()
        go_on.wait(60)

    place.graphs.when_loaded(hold)
    assert looked.wait(60)
    place.graphs.request([place.wanted], [place.folder], build=False)
    assert place.wanted.is_missed and place.wanted.is_pending
    assert place.wanted.reason == "no compiled file"
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


# --- the log ----------------------------------------------------------------------------------


def broken(label: str) -> BuildError:
    """A build's failure as a worker's thread makes it of a worker's answer."""
    error = BuildError(f"ValueError: {label} is unhappy")
    error.__cause__ = WorkerError(
        f'Traceback (most recent call last):\n  File "x.py", line 3, in run\nValueError: {label}'
    )
    return error


def test_a_workers_trace_is_in_the_log_once_and_the_warning_is_one_line(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def fail(job: Job) -> BuildResult:
        raise broken(job.key[:8])

    place.builder.answer = fail
    for channels in (4, 8, 12):
        assert place.ask(place.graph(channels=channels), build=True).state is State.FAILED
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(lines) == 3
    assert all("\n" not in line and "is unhappy" in line for line in lines)
    assert not any(r.exc_info for r in caplog.records if r.levelno == logging.WARNING)
    assert caplog.text.count('File "x.py", line 3, in run') == 1


def test_the_cause_of_a_load_that_failed_is_in_the_log_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    refusal = GraphFileError("its payload does not load with this torch")
    refusal.__cause__ = ImportError("no module of that name")
    place.backend.error = refusal
    for channels in (4, 8):
        graph = place.graph(channels=channels)
        data = place.file(graph, channels=channels)
        saved.put_at(place.store.root / file_name(graph.key), data)
        place.ask(graph, build=True)
    assert caplog.text.count("no module of that name") == 1
