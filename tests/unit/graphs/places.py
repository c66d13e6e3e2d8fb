"""Where a graph of a test is asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from warmgraph_backends.building.claims import Claims
from warmgraph_backends.building.contract import BuildResult, Job
from warmgraph_backends.events import Events
from warmgraph_backends.graphs.compiled_graph import CompiledGraph, manifest_of
from warmgraph_backends.graphs.library import Graphs
from warmgraph_backends.storing.graph_file import encode
from warmgraph_backends.storing.manifest import read_facts
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.storing.store import Store
from warmgraph_backends.target import keys

from .. import saved


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

    def graph(self, **changes: Any) -> CompiledGraph:
        kind = saved.description(**changes)
        return self.graphs.graph(kind, self.backend, keys.target("cpu", self.backend))

    def file(self, graph: CompiledGraph, *, channels: int = 4) -> bytes:
        """The bytes of a good file of a graph."""
        manifest = manifest_of(graph, read_facts(saved.facts(channels)), 4.2)
        return encode(manifest, saved.packed(), self.signer)

    def ask(self, graph: CompiledGraph | None = None, *, build: bool = False) -> CompiledGraph:
        graph = graph or self.wanted
        self.graphs.request([graph], [self.folder], build=build)
        for _ in range(3):  # a build's answer is taken in the loader's thread as well
            self.graphs.settle()
        return graph
