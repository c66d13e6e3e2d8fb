"""The graphs of this process: found in the store, loaded, or built, each under its key."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..building.builder import Builder
from ..building.claims import Claims
from ..building.contract import BuildResult, Job
from ..contract import Compiler, RegionSpec
from ..errors import CancelledBuildError, GraphFileError, ManifestError, WarmgraphError
from ..events import Event, Events
from ..fleet.remote import Remote
from ..reasons import NOTHING, Reason, of, with_remedy
from ..storing.graph_file import SUFFIX
from ..storing.store import Store
from ..target import keys
from ..target.target import explain_target, target_name
from .compiled_graph import (
    MAX_ATTEMPTS,
    CompiledGraph,
    Loaded,
    Outcome,
    State,
    manifest_of,
    validate_result,
    validate_weights,
)
from .dump import dump_description, dump_graph
from .outcomes import cost_of, loaded_of, raw_of, refusal_of, what_stays, words_of

logger = logging.getLogger(__name__)

_CLOSED = of("closed")
_NEIGHBOURS = 512  # files of one folder that are read, at most, to explain a miss


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
        self._builder = builder
        self._claims = claims
        self._events = events
        self._lock = threading.Lock()
        #: By key and card: those of one key share its file, its claim and its build.
        self._graphs: dict[tuple[str, int], CompiledGraph] = {}
        #: Builds that have not come to their end, by key; of the loader's thread.
        self._building: dict[str, Future[BuildResult]] = {}
        self._warned: set[str] = set()
        self._detailed: set[str] = set()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="warmgraph-load")
        self._versions = itertools.count(1)
        #: Another number after each change of a state; sessions compare it before each step.
        self.version = 0
        self.builds = 0
        self.loads = 0
        #: Why nothing is kept on disk, as far as is known.
        self.unkept: str | None = None
        self._has_looked = False

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
                    known = graph.outcome
                    if build or known.state is State.FAILED:  # else it holds meanwhile
                        known = Outcome()
                    graph.attempts += graph.state is State.FAILED
                    graph.folders, graph.build_wanted = tuple(folders), build
                    graph.outcome = known._replace(state=State.LOADING)
                    wanted.append(graph)
                elif graph.state is State.LOADING:
                    graph.folders += tuple(f for f in folders if f not in graph.folders)
                    graph.build_wanted |= build
        for graph in sorted(wanted, key=cost_of, reverse=True):
            self._hand_over(graph, self._load_or_build, graph)

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
        self._claims.close()
        self._loader.shutdown(wait=False, cancel_futures=True)
        for graph in self._snapshot():
            if graph.state is State.LOADING or graph.outcome.elsewhere:
                graph.outcome = Outcome(State.MISSING, _CLOSED)

    def when_loaded(self, task: Callable[[], None]) -> None:
        """Run a task in the loader's thread, after what was requested before it."""
        self._loader.submit(_logged, task)

    def _hand_over(self, graph: CompiledGraph, task: Callable[..., None], *arguments: Any) -> None:
        """Have the loader's thread do something for a pending graph."""
        try:
            self._loader.submit(task, *arguments)
        except RuntimeError as error:  # it takes no more tasks
            logger.debug("%s is not waited for: %s", graph.description.label, error)
            self._set(graph, Outcome(State.MISSING, _CLOSED))

    def _load_or_build(
        self, graph: CompiledGraph, first: bool = True, *, remote: bool = True
    ) -> None:
        """Look for a graph; afterwards somebody works on it, or it has a reason.

        Args:
            remote: whether to look in the remote store as well; then it comes back here, without
                waiting.
        """
        remote = remote and self._remote is not None
        try:
            build: bool | None = None
            while build is None:
                folders = graph.folders
                if self._find(graph, folders, explain=not remote):
                    return
                if remote:
                    remote = False
                    if self._look_elsewhere(graph, first):
                        return
                    if not graph.build_wanted:
                        continue  # to explain it
                with self._lock:  # from here on another request finds the graph missing
                    if graph.folders == folders:  # else more folders were named meanwhile
                        build = graph.build_wanted
                        state = State.BUILDING if build else State.MISSING
                        graph.outcome = graph.outcome._replace(state=state, elsewhere=False)
            if build:
                self._claim_and_build(graph, first)
            else:
                self._set(graph, graph.outcome)
        except BaseException as error:  # the outermost frame, whatever a backend's code raises
            self._give_up(graph, of("gave_up", error=words_of(error)), error)

    def _look_elsewhere(self, graph: CompiledGraph, first: bool) -> bool:
        """Have a graph looked for in the remote store; False if that is of no use now."""

        def come_back() -> None:
            if graph.is_pending:  # else dropped meanwhile
                self._load_or_build(graph, first, remote=False)

        def then() -> None:
            self._hand_over(graph, _logged, come_back)

        if self._remote is None:
            return False
        self._look_at_store()
        return self._remote.look(graph.key, graph.target, then)

    def _find(
        self, graph: CompiledGraph, folders: tuple[Path, ...], *, explain: bool = True
    ) -> bool:
        """Load a graph from a file; if there is none, say why unless it is to be built."""
        reason: Reason | None = None
        remedy = NOTHING
        try:
            if self._load(graph, folders):
                return True
        except GraphFileError as error:
            # A file that must not be used is named, and built anew where that is allowed.
            graph.refused = refusal_of(error)
            reason, remedy, _ = graph.refused
            if graph.build_wanted:  # else the sessions that wait for it report it
                self._warn_once(with_remedy(reason, remedy or of("do_nothing_anew")))
            self._detail(f"{graph.description.label} was not loaded", error)
        except BaseException as error:
            logger.exception("Loading %s failed", graph.description.label)
            reason = of("loading_failed", error=words_of(error))
        if explain and not graph.build_wanted:
            if reason is None and graph.refused is not None:
                reason, remedy, _ = graph.refused
            reason = reason or self._explain_missing(graph, folders)
        graph.outcome = graph.outcome._replace(reason=reason, remedy=remedy)
        return False

    def _give_up(self, graph: CompiledGraph, why: Reason, error: BaseException) -> None:
        """Fail a graph at the boundary of a thread, if nothing else has ended it."""
        logger.error("%s: %s", graph.description.label, why, exc_info=error)
        if graph.state is not State.READY:
            self._set(graph, Outcome(State.FAILED, why))

    def _detail(self, what: str, error: BaseException) -> None:
        """Write an error's causes to the log, a worker's trace among them; the same ones once."""
        if error.__cause__ is None:
            return
        cause = str(error.__cause__)
        frames = [line for line in cause.splitlines() if line.startswith('  File "')]
        mark = "\n".join(frames) or cause
        if mark not in self._detailed:
            self._detailed.add(mark)
            logger.info("Warmgraph: %s, in detail:", what, exc_info=error)

    def _claim_and_build(self, graph: CompiledGraph, first: bool) -> None:
        """Build a graph, or have it looked for again when another server has built it."""

        def look_again(first: bool = True) -> None:
            if graph.state is State.BUILDING:
                self._load_or_build(graph, first)
            else:  # dropped meanwhile
                self._claims.release(graph.key)

        elsewhere = not self._claims.take(
            graph.key, lambda: self._hand_over(graph, _logged, look_again), graph.target
        )
        if elsewhere:
            self._set(graph, graph.outcome._replace(state=State.BUILDING, elsewhere=True))
        elif first and graph.refused is None and self._store.find(graph.key) is not None:
            look_again(first=False)  # it arrived between the look and the claim
        else:
            self._build(graph)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def _load(self, graph: CompiledGraph, folders: tuple[Path, ...]) -> bool:
        started = time.perf_counter()
        file = self._store.load(graph.key, folders)
        if file is None:
            return False
        facts = file.manifest.facts
        try:
            validate_weights(graph, facts)
        except ManifestError as error:
            raise GraphFileError(
                of("file_unlike_part", path=file.path, error=error.reason),
                remedy=of("do_nothing_again"),
            ) from error
        call = graph.backend.load(file.payload, graph.card)
        self._dump(graph, file.payload)
        size = None
        with suppress(OSError):  # another process may have evicted it by now
            size = file.path.stat().st_size
        loaded = loaded_of(call, facts, file.manifest.payload.sha256, file.manifest.build_seconds)
        took_ms = (time.perf_counter() - started) * 1e3
        self.loads += 1
        self._ready(graph, loaded._replace(source="loaded", load_ms=took_ms, bytes=size))
        return True

    def _ready(self, graph: CompiledGraph, loaded: Loaded) -> None:
        graph.refused = None
        self._set(graph, Outcome(State.READY, loaded=loaded))

    def _look_at_store(self) -> None:
        """Report before anything is built or fetched whether it can be kept; a complete store need
        not be writable.
        """
        if self._has_looked:
            return
        self._has_looked = True
        self.unkept = self._store.why_unwritable()
        if self.unkept is not None:
            logger.warning("What is compiled is not kept on disk: %s", self.unkept)
            self._note_change()

    def _build(self, graph: CompiledGraph) -> None:
        needs = graph.backend.needs_to_build(graph.description.device)
        if (unmet := next((need for need in needs if not need.met), None)) is not None:
            self._warn_once(of("nothing_compiles", why=with_remedy(unmet.reason, unmet.remedy)))
            self._set(graph, Outcome(State.FAILED, of("compiling_failed", why=unmet.reason)))
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
        job = Job(key=graph.key, label=graph.description.label, cost=cost_of(graph), task=task)
        self._set(graph, graph.outcome._replace(state=State.BUILDING, elsewhere=False))
        future = self._building.get(graph.key) or self._builder.submit(job)
        self._building[graph.key] = future
        future.add_done_callback(lambda done: self._hand_over(graph, self._arrived, graph, done))

    def _arrived(self, graph: CompiledGraph, future: Future[BuildResult]) -> None:
        """Take a build's outcome; whatever it is, the graph is not building afterwards."""
        if self._building.get(graph.key) is future:
            del self._building[graph.key]
        try:
            self._take(graph, future)
        except BaseException as error:  # the outermost frame, whatever a backend's code raises
            self._give_up(graph, of("unusable", error=words_of(error)), error)

    def _take(self, graph: CompiledGraph, future: Future[BuildResult]) -> None:
        error = CancelledBuildError() if future.cancelled() else future.exception()
        if isinstance(error, CancelledBuildError):
            self._set(graph, Outcome(State.MISSING, error.reason))
            return
        if error is not None:
            reason = error.reason if isinstance(error, WarmgraphError) else words_of(error)
            if isinstance(error, WarmgraphError) and error.final:
                graph.attempts = MAX_ATTEMPTS
                self._warn_once(of("until_restart", why=error.told))
            else:
                logger.warning("%s: %s", what_stays(graph), reason)
            self._detail(f"the build of {graph.description.label} failed", error)
            self._set(graph, Outcome(State.FAILED, of("compiling_failed", why=reason)))
            return
        result = future.result()
        try:
            loaded = self._keep(graph, result)
        except WarmgraphError as failure:
            logger.warning("%s: %s", what_stays(graph), failure)
            self._detail(f"{graph.description.label} was built and is not used", failure)
            graph.drop(failure.reason)
            self._set(graph, graph.outcome)
            return
        self._ready(graph, loaded)

    def _kept(self, graph: CompiledGraph, result: BuildResult) -> Loaded | None:
        """Use a build also for another card that waited for it."""
        others = (g.loaded for g in self._snapshot() if g.key == graph.key and g is not graph)
        same = (each for each in others if each and each.payload_sha256 == result.payload.sha256)
        return next(same, None)

    def _keep(self, graph: CompiledGraph, result: BuildResult) -> Loaded:
        """Load a fresh graph and put its file into the store; without a disk it lives in memory."""
        facts, seconds = validate_result(graph, result)
        raw = raw_of(result)
        call, size = graph.backend.load(raw, graph.card), None
        if (kept := self._kept(graph, result)) is not None:
            return kept._replace(call=call)
        self.builds += 1
        self._dump(graph, raw)
        manifest = manifest_of(graph, facts, seconds)
        try:
            path = self._store.put(manifest, result.payload)
            size = path.stat().st_size
            if self._remote is not None:
                self._remote.push(path, graph.key, graph.target)
            self._store.evict(keep=[g.key for g in self._snapshot() if g.state is State.READY])
            self.unkept = None
        except (GraphFileError, OSError) as error:
            if self.unkept is None:
                logger.warning("%s is not kept on disk: %s", graph.description.label, error)
            told = error.told if isinstance(error, GraphFileError) else str(error)
            self.unkept = Reason.plain(told)
        loaded = loaded_of(call, facts, result.payload.sha256, seconds)
        return loaded._replace(source="built", bytes=size)

    def _dump(self, graph: CompiledGraph, payload: bytes) -> None:
        if self._dump_folder is not None:
            dump_graph(self._dump_folder, graph, payload)

    def _explain_missing(self, graph: CompiledGraph, folders: Sequence[Path]) -> Reason:
        """Say why no file serves: none at all, or one for another target or another host."""
        for path in self._similar(folders):
            try:
                manifest = self._store.read_manifest(path, kind=graph.description.label)
            except GraphFileError as error:
                logger.debug("Passed over while a miss was explained: %s", error)
                continue
            if manifest is None:
                continue
            target = keys.target(graph.description.device, graph.backend, graph.card)
            lines = explain_target(manifest.target, target)
            lines += keys.explain_structure(manifest, graph.description)
            if lines:
                return of("no_file_fits", why=lines[:3])
        return of("no_file")

    def _similar(self, folders: Sequence[Path]) -> list[Path]:
        found: list[Path] = []
        for folder in (*folders, self._store.root):
            with suppress(OSError):  # it is gone, or no folder
                names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
                found += [Path(folder) / name for name in names[:_NEIGHBOURS]]
        return found

    def _snapshot(self) -> list[CompiledGraph]:
        with self._lock:
            return list(self._graphs.values())

    def _set(self, graph: CompiledGraph, outcome: Outcome) -> None:
        if outcome.state is not State.BUILDING:
            self._claims.release(graph.key)
        graph.outcome = outcome
        self._note_change()

    def _note_change(self) -> None:
        self.version = next(self._versions)  # from any thread: no two changes are one number
        self._events.publish(Event.GRAPH_CHANGED)

    def _dropped(self) -> None:
        """A graph was dropped, in a step of a model; the loader's thread calls listeners."""
        self.version = next(self._versions)
        with suppress(RuntimeError):  # closed meanwhile
            self._loader.submit(self._events.publish, Event.GRAPH_CHANGED)


def _logged(task: Callable[..., None], *arguments: Any) -> None:
    try:
        task(*arguments)
    except Exception:
        logger.exception("Warmgraph's background work failed")
