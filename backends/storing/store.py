"""The shared store of graph files: find, verify, put, link into workflow folders, evict.

    ROOT/KEY.safetensors                 a graph
    ROOT/KEY.safetensors.broken          a damaged one, moved aside; the newest 20 are kept
    ROOT/FINGERPRINT/KEY.safetensors     one whose plain name is taken by a file signed elsewhere;
                                         by the key that signed it
    NAME.graphs/.KEY.safetensors         a hard link or copy beside a workflow; never evicted

Any number of threads and processes may use one store: files appear whole or not at all, and whoever
reads one checks it.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import GraphFileError
from ..reasons import of
from .files import identity, put_in_place, remove_stale, same_file, why_unwritable, write_whole
from .graph_file import (
    CompressedPayload,
    Fault,
    GraphFile,
    Header,
    RefusedFileError,
    encode,
    file_name,
    key_of,
    read_graph,
    read_header,
)
from .manifest import Manifest
from .signing import Signer

logger = logging.getLogger(__name__)

BROKEN = ".broken"
BROKEN_KEPT = 20
_OWN_FOLDER = re.compile(r"[0-9a-f]{8}")  # a signing key's fingerprint


class StoreUsage(NamedTuple):
    """How many graphs the shared store holds, and their size on disk in bytes."""

    files: int
    bytes: int


class Store:
    """Graph files of this machine, shared by every model, workflow and server process.

    Args:
        root: The shared folder; made when something is put there.
        signer: Signs what is put; only what it signed is ever read.
        cap_bytes: Size of the shared folder that `evict` keeps to, asked each time.
        private: The pack's system user directory, not reachable over HTTP; `spool` lies in it.
    """

    def __init__(
        self, root: Path, signer: Signer, *, cap_bytes: Callable[[], int], private: Path
    ) -> None:
        self.root = Path(os.path.abspath(root))
        self.spool = Path(private) / "spool"
        self._signer = signer
        self._cap_bytes = cap_bytes
        self._evicting = threading.Lock()

    def trust_command(self, folder: Path) -> str:
        """Return what is typed at the server's console to trust the files of a folder."""
        return self._signer.trust_command(folder)

    @property
    def fingerprint(self) -> str | None:
        """What names this machine's key in the files that it signed; None without one."""
        with suppress(GraphFileError):
            return self._signer.fingerprint
        return None

    def why_unwritable(self) -> str | None:
        """Try to put something into the shared folder; say why that is not possible."""
        trial = self.root / f".{uuid.uuid4().hex}.trial"
        try:
            with _writing(self.root):
                self.root.mkdir(parents=True, exist_ok=True)
                write_whole(trial, b"")
                trial.unlink()
        except GraphFileError as error:
            return str(error)
        return None

    def candidates(self, key: str, folders: Sequence[Path] = ()) -> Iterator[Path]:
        """Yield every existing file of this graph: the shared store's first, then each folder's."""
        yield from self._shared(key)
        for folder in folders:
            path = Path(folder) / file_name(key, hidden=True)
            if os.path.exists(path):
                yield path

    def find(self, key: str) -> Path | None:
        """Return the shared store's file of a key, None without one; nothing is verified yet."""
        return next(self.candidates(key), None)

    def has(self, key: str) -> bool:
        """Tell whether the shared store has a graph that would load, as far as headers tell."""
        return any(map(self._is_ours, self._shared(key)))

    def load(self, key: str, folders: Sequence[Path] = ()) -> GraphFile | None:
        """Read the first of `candidates` that passes every check, None when there are none.

        Raises:
            GraphFileError: there are candidates but none may be used; the one that can be trusted
                speaks for all.
        """
        errors: list[GraphFileError] = []
        for path in self.candidates(key, folders):
            try:
                return self.read(path)
            except GraphFileError as error:
                errors.append(error)
        if not errors:
            return None
        untrusted = (error for error in errors if _fault(error) is Fault.UNTRUSTED)
        raise next(untrusted, errors[0])

    def read(self, path: Path) -> GraphFile:
        """Read and verify one graph file, and mark it as used.

        A damaged file of the shared store is moved aside, so that the next build takes its place. A
        file that is unsigned or signed elsewhere stays where it is: it may be trusted later.

        Raises:
            GraphFileError: it must not be used; the text says why and what to do.
        """
        seen = identity(path)
        try:
            graph = read_graph(path, self._signer)
        except RefusedFileError as error:
            if error.fault is Fault.DAMAGED and self._is_shared(path):
                _move_aside(path, seen)
            raise
        with suppress(OSError):  # the folder may be read-only
            os.utime(path)
        return graph

    def read_manifest(self, path: Path, *, kind: str | None = None) -> Manifest | None:
        """Return what a file of any origin says about itself, None when it is of another kind than
        the only one that is wanted; its payload is not touched.

        Raises:
            GraphFileError: it cannot be read, or what it says is not a graph file's.
        """
        header = read_header(path)
        if kind is not None and header.data.get("kind") != kind:
            return None
        return header.read()

    def put(self, manifest: Mapping[str, Any], payload: CompressedPayload) -> Path:
        """Sign a graph and write it to the shared store, in place of an older file of that name.

        Only an intact file that was signed elsewhere keeps its place (another server with its own
        key may be using it); the graph then goes into this key's own folder.

        Raises:
            GraphFileError: disk full, folder read-only; nothing is left behind and no file is lost.
        """
        data = encode(manifest, payload, self._signer)
        target = self._target(str(manifest["key"]))
        with _writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                write_whole(target, data)
            except PermissionError:
                if not self._is_ours(target):  # Windows: another process has just put it
                    raise
        return target

    def take_in(self, draft: Path) -> Path:
        """Put a file that came from elsewhere into the shared store, once it passed every check.

        Args:
            draft: its bytes, below the name that it has in a store.

        Raises:
            GraphFileError: it must not be used, or the store cannot be written.
        """
        graph = read_graph(draft, self._signer)
        target = self.root / draft.name
        if self._is_foreign(target):
            target = self.root / str(graph.manifest.signer) / draft.name
        with _writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, draft.read_bytes())
        return target

    def link(self, key: str, folder: Path) -> bool:
        """Make a workflow's folder hold this graph, by a hard link or else a copy.

        Args:
            key: A graph of the shared store.
            folder: A checked `NAME.graphs`; made when missing.

        Returns:
            Whether the folder holds the graph now. False when the store has no such graph, or when
            the folder has an intact file in its place that was not signed here: that one stays.

        Raises:
            GraphFileError: the store's file is damaged, or the folder cannot be written.
        """
        source = next(self._shared(key), None)
        if source is None:
            return False
        target = Path(folder) / file_name(key, hidden=True)
        if same_file(source, target) or self._verifies(target):
            return True
        if self._is_foreign(target):
            return False
        self.read(source)
        _place(source, target)
        remove_stale(target.parent)
        return True

    def evict(self, keep: Collection[str] = ()) -> list[str]:
        """Delete the least recently used graphs of the shared store until it is within its cap, and
        temporary files that a dead process left. Files in workflow folders are never looked at.

        Args:
            keep: Keys that stay whatever the cap says.

        Returns:
            The keys of the deleted files.
        """
        evicted = []
        with self._evicting:
            for folder in self._folders():
                remove_stale(folder)
            graphs = sorted(self.graphs(), key=lambda entry: entry[1].st_mtime_ns)
            excess = sum(status.st_size for _, status in graphs) - self._cap_bytes()
            for path, status in graphs:
                if excess <= 0:
                    break
                key = key_of(path)
                if key is None or key in keep:
                    continue
                if _unlinked(path):
                    excess -= status.st_size
                    evicted.append(key)
        if evicted:
            logger.info(
                "Warmgraph: deleted %d compiled graphs that were used least recently", len(evicted)
            )
        return evicted

    @property
    def is_full(self) -> bool:
        """Whether anything more would have `evict` delete something."""
        return self.usage().bytes >= self._cap_bytes()

    def usage(self) -> StoreUsage:
        """Count the shared store's graphs and their bytes."""
        sizes = [status.st_size for _, status in self.graphs()]
        return StoreUsage(len(sizes), sum(sizes))

    def graphs(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the shared store's graph files; one that vanishes meanwhile is left out."""
        for folder in self._folders():
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    path = Path(entry.path)
                    if key_of(path) is None or entry.name.startswith("."):
                        continue
                    with suppress(OSError):
                        if entry.is_file(follow_symlinks=False):
                            yield path, entry.stat(follow_symlinks=False)

    def remove(self, files: Collection[Path]) -> StoreUsage:
        """Delete some of the files that `graphs` told of; those in workflow folders stay.

        Returns:
            How many are gone, and their bytes.
        """
        removed: list[int] = []
        with self._evicting:
            for path, status in list(self.graphs()):
                if path in files and _unlinked(path):
                    removed.append(status.st_size)
        if removed:
            logger.info("Warmgraph: deleted %d compiled graphs that the user cleared", len(removed))
        return StoreUsage(len(removed), sum(removed))

    def _shared(self, key: str) -> Iterator[Path]:
        name = file_name(key)
        folders = [self.root]
        with suppress(GraphFileError):  # without a signing key nothing loads, and `read` says so
            folders[:0] = [self.root / fingerprint for fingerprint in self._signer.readable]
        for folder in folders:
            if os.path.exists(folder / name):
                yield folder / name

    def _target(self, key: str) -> Path:
        plain = self.root / file_name(key)
        own = self._is_foreign(plain)
        return self.root / self._signer.fingerprint / plain.name if own else plain

    def _is_shared(self, path: Path) -> bool:
        return self.root in Path(os.path.abspath(path)).parents[:2]

    def _verifies(self, path: Path) -> bool:
        """Tell whether a file passes every check."""
        with suppress(RefusedFileError):
            return bool(read_graph(path, self._signer))
        return False

    def _is_ours(self, path: Path) -> bool:
        """Tell whether a file would load, as far as its header tells."""
        header = _header(path)
        with suppress(RefusedFileError):
            return header is not None and header.is_signed(self._signer) and bool(header.read())
        return False

    def _is_foreign(self, path: Path) -> bool:
        """Tell whether a file would load once it is trusted, as far as its header tells."""
        header = _header(path)
        return (
            header is not None
            and header.data.get("key") == key_of(path)
            and not header.claims(self._signer)
            and not header.is_signed(self._signer)
        )

    def _folders(self) -> Iterator[Path]:
        yield self.root
        with suppress(OSError), os.scandir(self.root) as entries:
            for entry in entries:
                if _OWN_FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)


def _unlinked(path: Path) -> bool:
    with suppress(OSError):  # in use (Windows), or another process was quicker
        path.unlink()
        return True
    return False


def _place(source: Path, target: Path) -> None:
    """Give a verified file a second name, as a copy where hard links do not work."""
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            put_in_place(target, lambda draft: os.link(source, draft))
        except OSError:
            write_whole(target, source.read_bytes())


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why, remedy = why_unwritable(error, target)
        raise GraphFileError(
            of("file_unwritable", path=target, error=why), remedy=remedy
        ) from error


def _move_aside(path: Path, seen: tuple[int, ...] | None) -> None:
    """Rename the damaged file that was read, not a good one that has just taken its place."""
    broken = path.with_name(path.name + BROKEN)
    with suppress(OSError):
        os.replace(path, broken)
        if identity(broken) != seen:
            os.replace(broken, path)
            return
        logger.info("Warmgraph: moved a damaged compiled graph aside: %s", broken)
        kept = sorted(path.parent.glob(f"*{BROKEN}"), key=lambda item: item.stat().st_mtime_ns)
        for old in kept[:-BROKEN_KEPT]:
            old.unlink()


def _header(path: Path) -> Header | None:
    with suppress(RefusedFileError):
        return read_header(path)
    return None


def _fault(error: GraphFileError) -> Fault | None:
    return error.fault if isinstance(error, RefusedFileError) else None
