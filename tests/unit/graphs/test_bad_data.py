"""Whatever lies in the folders or comes from a worker: no graph stays between states, and what
others left there stops no good one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from warmgraph_backends.building.answers import WorkerError
from warmgraph_backends.building.contract import BuildResult, Job
from warmgraph_backends.errors import BuildError, GraphFileError
from warmgraph_backends.graphs.compiled_graph import State
from warmgraph_backends.storing.graph_file import file_name

from .. import saved
from .places import Place

DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of a manifest: the value at a dotted path."""

    def change(manifest: dict[str, Any]) -> None:
        *way, last = path.split(".")
        part: Any = manifest
        for name in way:
            part = part[int(name) if isinstance(part, list) else name]
        part[int(last) if isinstance(part, list) else last] = value

    return change


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
    assert graph.reason == "no compiled graph"
    good = place.file(graph)
    saved.put_at(place.store.root / file_name(graph.key), good)
    assert place.ask().state is State.READY


def test_a_good_neighbour_still_explains_a_miss_beside_an_odd_one(place: Place) -> None:
    other = place.graph(channels=8)
    odd = saved.changed(place.file(other), put("target", []), place.signer)
    saved.put_at(place.store.root / file_name("0" * 64), odd)
    saved.put_at(place.store.root / file_name(other.key), place.file(other, channels=8))
    assert "its inputs differ" in (place.ask().reason or "")


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
