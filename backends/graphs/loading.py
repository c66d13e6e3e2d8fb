"""Makes graphs callable: from a file, or from what a worker built, which is then kept in one."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from ..building.contract import BuildResult
from ..errors import BuildError, GraphFileError, ManifestError
from ..fleet.remote import Remote
from ..reasons import Reason, of
from ..storing.graph_file import SUFFIX, unpack_payload
from ..storing.store import Store
from ..target import keys
from ..target.target import explain_target
from .compiled_graph import CompiledGraph, Loaded, manifest_of, validate_result, validate_weights
from .dump import dump_graph

logger = logging.getLogger(__name__)

_NEIGHBOURS = 512  # files of one folder that are read, at most, to explain a miss


class Loading:
    """Loads graphs, in one thread."""

    def __init__(self, store: Store, remote: Remote | None, dump: Path | None) -> None:
        """Set up; nothing is read.

        Args:
            store: where files are.
            remote: gets each file that is written.
            dump: a folder in which each graph is written down for a developer.
        """
        self._store, self._remote, self._dump_folder = store, remote, dump
        #: Why nothing is kept on disk, as far as is known.
        self.unkept: str | None = None
        self._has_looked = False

    def from_file(self, graph: CompiledGraph, folders: Sequence[Path]) -> Loaded | None:
        """Load a graph from the store or one of the folders; None if there is no file.

        Raises:
            GraphFileError: there is one, and it must not be used.
        """
        started = time.perf_counter()
        file = self._store.load(graph.key, folders)
        if file is None:
            return None
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
        return Loaded(
            call,
            facts.weights,
            facts.work,
            source="loaded",
            payload_sha256=file.manifest.payload.sha256,
            build_seconds=file.manifest.build_seconds,
            load_ms=(time.perf_counter() - started) * 1e3,
            bytes=size,
            binary_bytes=facts.binary_bytes,
        )

    def from_build(
        self, graph: CompiledGraph, result: BuildResult, *, keep: Collection[str] | None
    ) -> Loaded:
        """Load what a worker built, and put it into the store; without a disk it lives in memory.

        Args:
            keep: keys of files that stay whatever the store's cap says; None: it is in the store.

        Raises:
            BuildError: it is not as it must be.
        """
        facts, seconds = validate_result(graph, result)
        try:
            raw = unpack_payload(result.payload)
        except ValueError as error:
            raise BuildError(of("bad_payload", error=error)) from error
        loaded = Loaded(
            graph.backend.load(raw, graph.card),
            facts.weights,
            facts.work,
            payload_sha256=result.payload.sha256,
            build_seconds=seconds,
            binary_bytes=facts.binary_bytes,
        )
        if keep is None:
            return loaded
        self._dump(graph, raw)
        size = None
        try:
            path = self._store.put(manifest_of(graph, facts, seconds), result.payload)
            size = path.stat().st_size
            if self._remote is not None:
                self._remote.push(path, graph.key, graph.target)
            self._store.evict(keep)
            self.unkept = None
        except (GraphFileError, OSError) as error:
            if self.unkept is None:
                logger.warning("%s is not kept on disk: %s", graph.description.label, error)
            told = error.told if isinstance(error, GraphFileError) else str(error)
            self.unkept = Reason.plain(told)
        return loaded._replace(bytes=size)

    def looks_unkept(self) -> bool:
        """Look, once, whether graphs can be kept; a complete store need not be writable."""
        if not self._has_looked:
            self._has_looked = True
            self.unkept = self._store.why_unwritable()
            if self.unkept is not None:
                logger.warning("What is compiled is not kept on disk: %s", self.unkept)
                return True
        return False

    def why_missing(self, graph: CompiledGraph, folders: Sequence[Path]) -> Reason:
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

    def _dump(self, graph: CompiledGraph, payload: bytes) -> None:
        if self._dump_folder is not None:
            dump_graph(self._dump_folder, graph, payload)
