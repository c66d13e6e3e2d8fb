"""Thousands of damaged files, manifests, results and messages, each from its number alone: no
exception in our threads, no graph between states, nothing loaded that the key has not signed.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.building.answers import AnswerError, read_answer, read_greeting
from warmgraph_backends.building.builder import Builder
from warmgraph_backends.building.claims import Claims
from warmgraph_backends.building.contract import BuildResult, Job
from warmgraph_backends.building.messages import ProtocolError, encode_message, read_message
from warmgraph_backends.errors import BuildError, GraphFileError, ManifestError
from warmgraph_backends.events import Events
from warmgraph_backends.graphs.compiled_graph import CompiledGraph, State, manifest_of
from warmgraph_backends.graphs.library import Graphs
from warmgraph_backends.storing import graph_file
from warmgraph_backends.storing.canonical_json import canonical_json
from warmgraph_backends.storing.graph_file import (
    GraphFile,
    encode,
    file_name,
    read_for_trust,
    read_header,
)
from warmgraph_backends.storing.manifest import read_facts
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.storing.store import Store
from warmgraph_backends.target import keys

from . import mutations, saved

SEED = 15
WORKER = Path(__file__).with_name("telling_worker.py")
ENDS = (State.MISSING, State.READY, State.FAILED)


class Recorder(Signer):
    """Signs as the machine does, and knows every text that it has signed."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.signed: set[str] = set()
        self._plain = Signer(directory)

    def sign(self, text: str) -> str:
        signature = super().sign(text)
        self.signed.add(text.removeprefix(graph_file._PURPOSE))
        return signature

    def verify(self, text: str, signature: str) -> bool:
        return self._plain.verify(text, signature)  # which signs, too, and is not to be noted


class Watched(Store):
    """A store that compares what it reads with what was signed."""

    unsigned = 0

    def read(self, path: Path) -> GraphFile:
        graph = super().read(path)
        recorder: Any = self._signer
        text = read_header(path).text
        honest = text in recorder.signed
        honest = honest and canonical_json(json.loads(text)) == canonical_json(graph.manifest.data)
        self.unsigned += not honest
        return graph


class Answering:
    """A builder that answers at once with what a test has in store."""

    def __init__(self) -> None:
        self.result: Callable[[Job], BuildResult] = lambda job: BuildResult(
            job.key, saved.packed(), saved.facts(), 4.2
        )

    def submit(self, job: Job) -> Future[BuildResult]:
        future: Future[BuildResult] = Future()
        future.set_result(self.result(job))
        return future


class Fuzz:
    """One run: a place with a signing key, cases by number, and what went wrong in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.signer = Recorder(root / "private")
        self.elsewhere = Signer(root / "elsewhere")
        self.store = Watched(
            root / "store", self.signer, cap_bytes=lambda: 1 << 30, private=root / "private"
        )
        self.folder = root / "w.graphs"
        self.builder: Any = Answering()
        self.backend: Any = saved.Counting()
        claims = Claims(self.store.root, self.signer, patience_s=lambda: 60.0)
        self.graphs = Graphs(self.store, self.builder, claims, Events())
        self.target = keys.target("cpu", self.backend)
        self.wrong: list[str] = []
        self.count: Counter[str] = Counter()

    def graph(self, channels: int = 4) -> CompiledGraph:
        """The one graph that is asked for (4 channels), or a neighbour of its kind."""
        return self.graphs.graph(saved.description(channels=channels), self.backend, self.target)

    def fresh(self) -> CompiledGraph:
        """The one graph that is asked for, as a new process has it."""
        self.graphs._graphs.clear()
        return self.graph()

    def ask(self, graph: CompiledGraph, *, build: bool) -> State:
        self.graphs.request([graph], [self.folder], build=build)
        for _ in range(3):
            self.graphs.settle()
        return graph.state

    def a_file(self, rng: random.Random) -> str:
        """Put one file somewhere, ask for the graph; returns what there was to see."""
        graph = self.fresh()
        near = rng.random() < 0.4
        owner = self.graph(8) if near else graph
        hidden = rng.random() < 0.5
        path = (self.folder if hidden else self.store.root) / file_name(owner.key, hidden=hidden)
        manifest = manifest_of(owner, read_facts(saved.facts(8 if near else 4)), 4.2)
        payload = saved.packed(rng.randbytes(rng.randrange(200)))
        data = encode(manifest, payload, self.signer)
        what = rng.choices(
            ("whole", "bytes", "container", "manifest", "payload", "name"), (2, 3, 2, 6, 1, 1)
        )[0]
        signer = rng.choice((self.signer, self.signer, self.elsewhere, None))
        if what == "bytes":
            data = mutations.mutate_bytes(data, rng)
        elif what == "container":
            data = mutations.mutate_container(data, rng)
        elif what == "manifest":
            data = mutations.mutate_manifest(data, rng, signer)
        elif what == "payload":
            data = mutations.mutate_payload(data, rng, signer)
        if what == "name" and sys.platform != "win32":
            mutations.misname(path, data, rng)
        else:
            saved.put_at(path, data)
        build = rng.random() < 0.2
        before = len(self.backend.loaded)
        state = self.ask(graph, build=build)
        if state not in ENDS or (state is State.MISSING and not graph.reason):
            self.wrong.append(f"left {state.value}, {graph.reason!r}")
        if build and state is not State.READY:
            self.wrong.append(f"not built: {graph.reason!r}")
        if what == "whole" and not near and (graph.source, state) != ("loaded", State.READY):
            self.wrong.append(f"a good file was not loaded: {graph.reason!r}")
        for read in (read_header, read_for_trust):  # as the console does
            try:
                read(path)  # type: ignore[operator]
            except GraphFileError as error:
                str(error).encode()
        for folder in (self.folder, self.store.root):
            shutil.rmtree(folder, ignore_errors=True)
        loaded = graph.source == "loaded" and len(self.backend.loaded) > before
        return f"{what} {'loaded' if loaded else 'not loaded'}{', near' if near else ''}"

    def a_result(self, rng: random.Random) -> str:
        """Have a graph built by a worker that says something odd of it."""
        graph = self.fresh()
        payload, facts, seconds = saved.packed(), saved.facts(), 4.2
        what = rng.choice(("whole", "facts", "facts", "facts", "payload", "seconds"))
        if what == "facts":
            facts = mutations.mutate(facts, rng)
        elif what == "seconds":
            seconds = mutations.odd(rng)
        elif what == "payload":
            payload = payload._replace(data=mutations.mutate_bytes(payload.data, rng))
        self.builder.result = lambda job: BuildResult(job.key, payload, facts, seconds)
        state = self.ask(graph, build=True)
        if state not in (State.READY, State.FAILED) or (what == "whole" and state is State.FAILED):
            self.wrong.append(f"a result left {state.value}, {graph.reason!r}")
        if state is State.READY and self.backend.loaded[-1] != saved.PAYLOAD:
            self.wrong.append("another payload was loaded than the worker's hash says")
        self.builder.result = Answering().result
        shutil.rmtree(self.store.root, ignore_errors=True)
        return f"result {what} {state.value}"

    def a_message(self, rng: random.Random) -> str:
        """Read a message of a worker that is none, or nearly so."""
        number = rng.randrange(5)
        good = {
            "result": {
                "job": number,
                "ok": True,
                "sha256": "0" * 64,
                "packed_bytes": 7,
                "raw_bytes": 7,
                "facts": saved.facts(),
                "seconds": 0.5,
            },
            "failure": {
                "job": number,
                "ok": False,
                "error": "x",
                "remedy": "",
                "trace": "t",
                "clean": True,
            },
            "measure": {"measure": "begin"},
        }[rng.choice(("result", "result", "failure", "measure"))]
        what = rng.choice(("whole", "bytes", "data", "data"))
        frame = encode_message(good)
        if what == "bytes":
            frame = mutations.mutate_bytes(frame, rng)
        elif what == "data":
            body = mutations.text_of(mutations.mutate(good, rng), rng)
            raw = body.encode("utf-8", "surrogatepass")
            frame = len(raw).to_bytes(4, "big") + raw
        try:
            message = read_message(io.BytesIO(frame))
        except ProtocolError as error:
            str(error).encode()
            return f"message {what} refused"
        if message is None:
            return f"message {what} none"
        outcome = "taken"
        try:
            read_answer(message, number)
        except AnswerError as error:
            str(error).encode()
            outcome = "no answer"
        try:
            read_greeting(message)
        except BuildError as error:
            str(error).encode()
        try:
            read_facts(message.get("facts"))
        except ManifestError as error:
            str(error).encode()
        if what == "whole" and outcome != "taken":
            self.wrong.append("a good message was refused")
        return f"message {what} {outcome}"

    def run(self, cases: int) -> None:
        """Run cases; each is made from its number alone."""
        kinds = (self.a_file, self.a_file, self.a_file, self.a_result, self.a_message)
        for case in range(cases):
            rng = random.Random(f"{SEED}/{case}")
            found = len(self.wrong)
            try:
                self.count[kinds[case % len(kinds)](rng)] += 1
            except Exception as error:
                self.wrong.append(f"raised {error!r}")
            self.wrong[found:] = [f"case {case}: {w}" for w in self.wrong[found:]]


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What escapes a thread, or is logged as an error."""
    found: list[str] = []

    class Errors(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(self.format(record))

    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(repr(args)))
    handler, root = Errors(logging.ERROR), logging.getLogger()
    root.addHandler(handler)
    yield found
    root.removeHandler(handler)


def check(root: Path, cases: int, errors: list[str]) -> None:
    fuzz = Fuzz(root)
    try:
        fuzz.run(cases)
    finally:
        fuzz.graphs.close()
    assert fuzz.wrong[:9] == []
    assert errors[:3] == []
    assert fuzz.store.unsigned == 0
    for way in (  # else nothing was tried
        "whole loaded",
        "manifest loaded",
        "manifest not loaded",
        "manifest not loaded, near",
        "bytes not loaded",
        "result whole ready",
        "result facts failed",
        "message whole taken",
        "message data no answer",
    ):
        assert fuzz.count[way] >= cases // 400, (way, fuzz.count)


def check_workers(root: Path, jobs: int, errors: list[str]) -> None:
    """Have real worker processes answer oddly: each job ends, and the next good one is built."""
    builder = Builder(
        hello={},
        spool=root / "spool",
        workers=lambda: 2,
        time_limit_s=lambda: 60.0,
        script=WORKER,
    )
    whole = 0
    try:
        for number in range(jobs):
            rng = random.Random(f"{SEED}/worker/{number}")
            good = {
                "job": "@job@",
                "ok": False,
                "error": "x",
                "remedy": "",
                "trace": "",
                "clean": True,
            }
            steps: list[dict[str, Any]] = [{"answer": {}}]
            what = rng.choice(("whole", "answer", "text", "raw"))
            if what == "answer":
                names = ("sha256", "raw_bytes", "facts", "seconds", "job", "ok")
                steps = [{"answer": {rng.choice(names): mutations.odd(rng)}}]
            elif what == "text":
                text = mutations.text_of(mutations.mutate(good, rng), rng)
                steps = [{"text": text.replace('"@job@"', "$job")}]
            elif what == "raw":
                frame = mutations.mutate_bytes(encode_message({"measure": "begin"}), rng)
                # It leaves, for one that has said half of something might say the rest.
                steps = [{"raw": (frame + b"\xff" * 8).hex()}, {"leave": True}]
            # A task is sent as plain JSON; odd numbers in it are the task's own fault.
            future = builder.submit(Job(f"key{number}", "a kind", 1, {"steps": steps}))
            error = future.exception(60.0)
            assert error is None or isinstance(error, BuildError), number
            if what == "whole":
                whole += 1
                assert error is None, number
            if error is not None:
                assert "\n" not in error.reason and len(error.reason) < 2100, number
    finally:
        builder.close()
    assert whole
    assert errors[:3] == []
    assert os.listdir(root / "spool") == []


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))


def test_two_thousand_cases_leave_nothing_wrong(tmp_path: Path, errors: list[str]) -> None:
    check(tmp_path, 2000, errors)


@pytest.mark.usefixtures("temp")
def test_odd_answers_of_real_workers_end_their_jobs(tmp_path: Path, errors: list[str]) -> None:
    check_workers(tmp_path, 40, errors)


@pytest.mark.slow  # five minutes of other cases than those above
@pytest.mark.usefixtures("temp")
def test_fifty_thousand_cases_leave_nothing_wrong(tmp_path: Path, errors: list[str]) -> None:
    check(tmp_path, 50_000, errors)
    check_workers(tmp_path, 300, errors)
