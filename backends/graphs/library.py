"""The graphs of this process: found in the store, loaded, or built, each under its key."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..building.builder import Builder
from ..building.claims import POLL_S, Claims
from ..building.contract import BuildResult, Job
from ..contract import Compiler, RegionSpec
from ..errors import CancelledBuildError, GraphFileError, WarmgraphError
from ..events import Event, Events
from ..fleet.remote import Remote
from ..reasons import NOTHING, Reason, of, with_remedy
from ..storing.store import Store
from ..target import keys
from ..target.target import target_name
from .compiled_graph import (
    MAX_ATTEMPTS,
    CompiledGraph,
    Loaded,
    Refusal,
    State,
    Status,
)
from .dump import dump_description
from .loading import Loading
from .said import Said

logger = logging.getLogger(__name__)

_CLOSED = of("closed")


class Graphs:
    """All graphs of the process. `request` returns at once; loads run in one thread of their
    own.
    """

    def __init__(
        self,
        store: Store,
        builder: Builder,
        claims: Claims,
        events: Events,
        *,
        dump: Path | None = None,
        remote: Remote | None = None,
    ) -> None:
        """Set up; nothing is read.

        Args:
            store: where files are.
            builder: who builds.
            claims: keeps servers from building the same graph.
            events: who is told of changes.
            dump: a folder in which each graph is written down for a developer.
            remote: a store that machines share, if there is one; `claims` closes it.
        """
        self._dump_folder = dump
        self._remote = remote
        self._store = store
        self._loading = Loading(store, remote, dump)
        self._builder = builder
        self._claims = claims
        self._events = events
        self._lock = threading.Lock()
        #: By key and card: those of one key share its file, its claim and its build.
        self._graphs: dict[tuple[str, int], CompiledGraph] = {}
        #: Builds that have not come to their end, by key; of the loader's thread.
        self._building: dict[str, Future[BuildResult]] = {}
        self._said = Said()
        self._closed = threading.Event()
        #: What other servers build, and whether a thread looks at that; of the loader's thread.
        self._awaited: list[CompiledGraph] = []
        self._is_watching = False
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="warmgraph-load")
        self._versions = itertools.count(1)
        #: Another number after each change of a state; sessions compare it before each step.
        self.version = 0
        self.builds = 0
        self.loads = 0

    @property
    def unkept(self) -> str | None:
        """Why nothing is kept on disk, as far as is known."""
        return self._loading.unkept

    def graph(
        self, description: RegionSpec, backend: Compiler, target: dict[str, Any], card: int = 0
    ) -> CompiledGraph:
        """Return the process's one graph for a kind on a card.

        Args:
            target: of that card.
            card: the number of a GPU; 0 without one.
        """
        key = keys.graph_key(description, target)
        with self._lock:
            if (key, card) not in self._graphs:
                self._graphs[key, card] = CompiledGraph(
                    key, description, backend, self._dropped, card, target_name(target)
                )
            return self._graphs[key, card]

    def ready_keys(self) -> set[str]:
        """Return the keys of the graphs that are loaded."""
        return {graph.key for graph in self._snapshot() if graph.state is State.READY}

    def awaited(self) -> int:
        """Return how many graphs are being looked for, built or loaded, here or elsewhere."""
        return sum(graph.is_pending for graph in self._snapshot())

    def untrusted(self) -> list[Path]:
        """Return the folders with untrusted files of missing graphs."""
        refused = [graph.refused for graph in self._snapshot() if graph.refused is not None]
        return sorted({each.untrusted_in for each in refused if each.untrusted_in is not None})

    def request(
        self, graphs: Iterable[CompiledGraph], folders: Sequence[Path], *, build: bool
    ) -> None:
        """Have graphs loaded, or built if there is no file; does not wait.

        Args:
            folders: graph folders to look in besides the store.
            build: whether to build what no file serves.
        """
        wanted = []
        with self._lock:
            for graph in graphs:
                if graph.state is State.MISSING or (
                    graph.state is State.FAILED and graph.attempts < MAX_ATTEMPTS
                ):
                    known = graph.status
                    if build or known.state is State.FAILED:  # else it holds meanwhile
                        known = Status()
                    graph.attempts += graph.state is State.FAILED
                    graph.folders, graph.build_wanted = tuple(folders), build
                    graph.status = known._replace(state=State.LOADING)
                    wanted.append(graph)
                elif graph.state is State.LOADING:
                    graph.folders += tuple(f for f in folders if f not in graph.folders)
                    graph.build_wanted |= build
        for graph in sorted(wanted, key=lambda each: each.cost, reverse=True):
            self._hand_over(graph, self._step, self._advance)

    def settle(self) -> None:
        """Wait until everything requested so far was looked for on disk (builds may go on), and in
        the remote store up to its patience.
        """
        self._loader.submit(int).result()
        if self._remote is not None:
            self._remote.settle()
            self._loader.submit(int).result()

    def close(self) -> None:
        """Stop loading; the builder is closed by its owner."""
        self._closed.set()
        self._claims.close()
        self._loader.shutdown(wait=False, cancel_futures=True)
        for graph in self._snapshot():
            if graph.state is State.LOADING or graph.status.elsewhere:
                graph.status = Status(State.MISSING, _CLOSED)

    def when_loaded(self, task: Callable[[], None]) -> None:
        """Run a task in the loader's thread, after what was requested before it."""
        self._loader.submit(_logged, task)

    def _hand_over(self, graph: CompiledGraph, task: Callable[..., None], *arguments: Any) -> None:
        """Have the loader's thread do something for a pending graph."""
        try:
            self._loader.submit(task, graph, *arguments)
        except RuntimeError as error:  # it takes no more tasks
            logger.debug("%s is not waited for: %s", graph.description.label, error)
            self._set(graph, Status(State.MISSING, _CLOSED))

    def _advance(self, graph: CompiledGraph, remote: bool = True) -> None:
        """Bring a pending graph on by all that needs no waiting: a file is loaded, the remote store
        is asked, another server's build awaited, or its own begun. What waits comes back here.

        Args:
            remote: whether the remote store is still to be asked.
        """
        is_settled = False
        while not is_settled:
            folders = graph.folders
            if self._find(graph, folders) or (remote and self._look_elsewhere(graph)):
                return
            remote = False
            if not graph.build_wanted:
                self._explain(graph, folders)
            with self._lock:  # from here on another request finds the graph missing
                is_settled = graph.folders == folders  # else more were named meanwhile
                if is_settled:
                    state = State.BUILDING if graph.build_wanted else State.MISSING
                    graph.status = graph.status._replace(state=state, elsewhere=False)
        if graph.state is State.MISSING:
            self._set(graph, graph.status)
        else:
            self._claim(graph)

    def _claim(self, graph: CompiledGraph) -> None:
        """Build a graph, or load it, unless another server builds it."""
        if not self._claims.take(graph.key, graph.target):
            if not graph.is_elsewhere:
                self._set(graph, graph.status._replace(elsewhere=True))
            if graph not in self._awaited:
                self._awaited.append(graph)
            if not self._is_watching:
                self._is_watching = True
                threading.Thread(target=self._watch, name="warmgraph-claims", daemon=True).start()
        elif not self._has_arrived(graph):
            self._build(graph)

    def _watch(self) -> None:
        """Claim what other servers build again and again, until nothing is left."""
        with suppress(RuntimeError, CancelledError):  # closed meanwhile
            while not self._closed.wait(POLL_S) and self._loader.submit(self._claim_again).result():
                pass

    def _claim_again(self) -> bool:
        awaited, self._awaited = self._awaited, []
        for graph in awaited:
            self._step(graph, self._claim)
        self._is_watching = bool(self._awaited)
        return self._is_watching

    def _step(self, graph: CompiledGraph, task: Callable[..., None], *arguments: Any) -> None:
        """Do something for a graph, if it has not been dropped meanwhile."""
        try:
            if graph.is_pending:
                task(graph, *arguments)
            else:
                self._claims.release(graph.key)
        except BaseException as error:  # the outermost frame, whatever a backend's code raises
            self._give_up(graph, of("gave_up", error=words_of(error)), error)

    def _look_elsewhere(self, graph: CompiledGraph) -> bool:
        """Have a graph looked for in the remote store; False if that is of no use now."""
        if self._remote is None:
            return False
        self._look_at_store()
        come_back = partial(self._hand_over, graph, self._step, self._advance, False)
        return self._remote.look(graph.key, graph.target, come_back)

    def _has_arrived(self, graph: CompiledGraph) -> bool:
        """Load a graph whose file came before it was claimed."""
        is_there = (graph.is_elsewhere or graph.refused is None) and self._store.find(graph.key)
        return bool(is_there) and self._find(graph, graph.folders)

    def _find(self, graph: CompiledGraph, folders: Sequence[Path]) -> bool:
        """Load a graph from a file; False if none serves, noting why a file is not used."""
        reason: Reason | None = None
        remedy = NOTHING
        try:
            if (loaded := self._loading.from_file(graph, folders)) is not None:
                self.loads += 1
                self._set(graph, Status(State.READY, loaded=loaded))
                return True
        except GraphFileError as error:
            # A file that must not be used is named, and built anew where that is allowed.
            graph.refused = Refusal.by(error)
            reason, remedy, _ = graph.refused
            if graph.build_wanted:  # else the sessions that wait for it report it
                self._said.warn(with_remedy(reason, remedy or of("do_nothing_anew")))
            self._said.detail(f"{graph.description.label} was not loaded", error)
        except BaseException as error:
            logger.exception("Loading %s failed", graph.description.label)
            reason = of("loading_failed", error=words_of(error))
        graph.status = graph.status._replace(reason=reason, remedy=remedy)
        return False

    def _explain(self, graph: CompiledGraph, folders: Sequence[Path]) -> None:
        """Say why no file serves a graph that is not to be built."""
        if graph.reason is None:
            reason, remedy, _ = graph.refused or (None, NOTHING, None)
            reason = reason or self._loading.why_missing(graph, folders)
            graph.status = graph.status._replace(reason=reason, remedy=remedy)

    def _give_up(self, graph: CompiledGraph, why: Reason, error: BaseException) -> None:
        """Fail a graph at the boundary of a thread, if nothing else has ended it."""
        logger.error("%s: %s", graph.description.label, why, exc_info=error)
        if graph.state is not State.READY:
            self._set(graph, Status(State.FAILED, why))

    def _look_at_store(self) -> None:
        if self._loading.looks_unkept():  # to be told before anything is built or fetched
            self._note_change()

    def _build(self, graph: CompiledGraph) -> None:
        needs = graph.backend.needs_to_build(graph.description.device)
        if (unmet := next((need for need in needs if not need.met), None)) is not None:
            self._said.warn(of("nothing_compiles", why=with_remedy(unmet.reason, unmet.remedy)))
            self._set(graph, Status(State.FAILED, of("compiling_failed", why=unmet.reason)))
            return
        self._look_at_store()
        task = {
            "key": graph.key,
            "description": graph.description.to_dict(),
            "backend": graph.backend.name,
            "card": graph.card,
        }
        if self._dump_folder is not None:
            task["dump"] = str(dump_description(self._dump_folder, graph))
        job = Job(key=graph.key, label=graph.description.label, cost=graph.cost, task=task)
        self._set(graph, graph.status._replace(state=State.BUILDING, elsewhere=False))
        future = self._building.get(graph.key) or self._builder.submit(job)
        self._building[graph.key] = future
        future.add_done_callback(lambda done: self._hand_over(graph, self._arrived, done))

    def _arrived(self, graph: CompiledGraph, future: Future[BuildResult]) -> None:
        """Take a build's result; whatever it is, the graph is not building afterwards."""
        if self._building.get(graph.key) is future:
            del self._building[graph.key]
        try:
            self._take(graph, future)
        except BaseException as error:  # the outermost frame, whatever a backend's code raises
            self._give_up(graph, of("unusable", error=words_of(error)), error)

    def _take(self, graph: CompiledGraph, future: Future[BuildResult]) -> None:
        error = CancelledBuildError() if future.cancelled() else future.exception()
        if isinstance(error, CancelledBuildError):
            self._set(graph, Status(State.MISSING, error.reason))
            return
        if error is not None:
            reason = error.reason if isinstance(error, WarmgraphError) else words_of(error)
            if isinstance(error, WarmgraphError) and error.final:
                graph.attempts = MAX_ATTEMPTS
                self._said.warn(of("until_restart", why=error.told))
            else:
                logger.warning("%s runs at normal speed: %s", graph.description.label, reason)
            self._said.detail(f"the build of {graph.description.label} failed", error)
            self._set(graph, Status(State.FAILED, of("compiling_failed", why=reason)))
            return
        result = future.result()
        try:
            loaded = self._keep(graph, result)
        except WarmgraphError as failure:
            logger.warning("%s runs at normal speed: %s", graph.description.label, failure)
            self._said.detail(f"{graph.description.label} was built and is not used", failure)
            graph.drop(failure.reason)
            self._set(graph, graph.status)
            return
        self._set(graph, Status(State.READY, loaded=loaded))

    def _keep(self, graph: CompiledGraph, result: BuildResult) -> Loaded:
        """Load and keep a build, once for all cards that waited for it."""
        graphs = self._snapshot()
        others = (g.loaded for g in graphs if g.key == graph.key and g is not graph)
        for kept in others:
            if kept is not None and kept.payload_sha256 == result.payload.sha256:
                return kept._replace(call=self._loading.from_build(graph, result, keep=None).call)
        ready = [g.key for g in graphs if g.state is State.READY]
        loaded = self._loading.from_build(graph, result, keep=ready)
        self.builds += 1
        return loaded

    def _snapshot(self) -> list[CompiledGraph]:
        with self._lock:
            return list(self._graphs.values())

    def _set(self, graph: CompiledGraph, status: Status) -> None:
        if status.state is not State.BUILDING:
            self._claims.release(graph.key)
        if status.state is State.READY:
            graph.refused = None
        graph.status = status
        self._note_change()

    def _note_change(self) -> None:
        self.version = next(self._versions)  # from any thread: no two changes are one number
        self._events.publish(Event.GRAPH_CHANGED)

    def _dropped(self) -> None:
        """A graph was dropped, in a step of a model; the loader's thread calls listeners."""
        self.version = next(self._versions)
        with suppress(RuntimeError):  # closed meanwhile
            self._loader.submit(self._events.publish, Event.GRAPH_CHANGED)


def words_of(error: BaseException) -> Reason:
    """An error in one line; some have no text."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return Reason.plain(text or type(error).__name__)


def _logged(task: Callable[[], None]) -> None:
    try:
        task()
    except Exception:
        logger.exception("Warmgraph's background work failed")
