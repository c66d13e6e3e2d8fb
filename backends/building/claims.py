"""Claims: one of the servers that share a store builds a graph, the others wait for its file.

    STORE/.KEY.FINGERPRINT.claim     locked by who builds it, until it releases it or ends

A claim is trusted for nothing but waiting: whoever waits too long, or cannot lock it, builds.
Servers with different signing keys cannot use each other's files, so they do not wait for each
other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..reasons import of
from ..storing.signing import Signer

if TYPE_CHECKING:
    from filelock import BaseFileLock

logger = logging.getLogger(__name__)

#: What is said of a graph that another server builds.
BY_ANOTHER_SERVER = of("compiled_elsewhere")
POLL_S = 0.5
_NAME = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{8}\.claim")
#: What is raised where there can be no lock: a folder in its place, a file system without them.
_NO_LOCKS = (OSError, NotImplementedError)


@dataclass(eq=False)
class Waiting:
    """A graph that is waited for: since when, by the monotonic clock, and what to do then; None
    once that was done.
    """

    since: float
    then: Callable[[], object] | None = None


class Claims:
    """The claims of one server process on graphs of one store.

    `take` and `release` may be called from any thread and do not wait; what was waited for is told
    in a thread of this object.
    """

    def __init__(self, folder: Path, signer: Signer, *, patience_s: Callable[[], float]) -> None:
        """Set up; nothing is read or made.

        Args:
            folder: of the store; made with the first claim.
            signer: whose files this server can use.
            patience_s: seconds to wait for another server at most, asked at each look.
        """
        self._folder = folder
        self._signer = signer
        self._patience_s = patience_s
        self._news = threading.Condition()
        # Guarded by the lock of `_news`.
        self._held: dict[str, BaseFileLock] = {}
        self._waiting: dict[str, Waiting] = {}
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._warned = False

    def take(self, key: str, then: Callable[[], object], target: str = "") -> bool:
        """Say whether to build a graph now.

        Args:
            key: the graph's key.
            then: called once if not: look for the file, and ask again if there is none.
            target: the name of the graph's target, for who shares more than a store.

        Returns:
            True: it is this server's to build, and to `release`. False: another server builds it.
        """
        with self._news:
            if self._closing.is_set() or key in self._held or self._is_impatient(key):
                return True
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                lock = _lock(self._path(key))
            except _NO_LOCKS as error:
                if not self._warned:
                    self._warned = True
                    logger.info(
                        "Warmgraph: graphs are built whatever other servers build: %s", error
                    )
                return True
            if lock is not None:
                self._waiting.pop(key, None)
                self._held[key] = lock
                return True
            self._waiting.setdefault(key, Waiting(time.monotonic())).then = then
            self._watch()
            return False

    def release(self, key: str) -> None:
        """Let a graph go: its file is there, or its build has failed. Nothing if it is not held."""
        with self._news:
            self._waiting.pop(key, None)
            lock = self._held.pop(key, None)
        if lock is not None:
            _remove(lock)

    def sweep(self) -> None:
        """Remove the files of servers that have ended."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    self._is_unlocked(Path(entry.path))

    def close(self) -> None:
        """Release everything; nothing that was waited for is told any more."""
        self._closing.set()
        with self._news:
            held = list(self._held)
            self._waiting.clear()
            self._news.notify_all()
        for key in held:
            self.release(key)

    def _path(self, key: str) -> Path:
        return self._folder / f".{key}.{self._signer.fingerprint}.claim"

    def _is_impatient(self, key: str) -> bool:
        """Whether this server has waited long enough; then it builds beside the other (under the
        lock).
        """
        waiting = self._waiting.get(key)
        if waiting is None or time.monotonic() - waiting.since < self._patience_s():
            return False
        del self._waiting[key]
        logger.info(
            "Warmgraph: another server takes long to build a graph; it is built here as well"
        )
        return True

    def _watch(self) -> None:
        """Have the thread run that looks at the others' claims (under the lock)."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._keep_watch, name="warmgraph-claims", daemon=True
            )
            self._thread.start()
        self._news.notify_all()

    def _keep_watch(self) -> None:
        while not self._closing.wait(POLL_S):
            with self._news:
                while not (self._waiting or self._closing.is_set()):
                    self._news.wait()
                waiting = {key: each for key, each in self._waiting.items() if each.then}
            for key, each in waiting.items():
                try:
                    late = time.monotonic() - each.since >= self._patience_s()
                    if late or self._is_free(key, each):
                        self._tell(key)
                except Exception:
                    logger.exception("Looking at the claims of other servers failed and goes on")

    def _is_free(self, key: str, waiting: Waiting) -> bool:
        """Whether nobody builds a graph that is waited for, or nobody can tell."""
        return self._is_unlocked(self._path(key))

    def _is_unlocked(self, path: Path) -> bool:
        """Whether no server holds a claim, whose file goes then, or nobody can tell."""
        try:
            lock = _lock(path)
        except _NO_LOCKS:
            return True
        if lock is not None:
            _remove(lock)
        return lock is not None

    def _tell(self, key: str) -> None:
        with self._news:
            waiting = self._waiting.get(key)
            if waiting is None or waiting.then is None or self._closing.is_set():
                return
            then, waiting.then = waiting.then, None  # how long it has waited stays known
        then()


def _lock(path: Path) -> BaseFileLock | None:
    """Lock a claim's file, made where it is not there; None where another one has it.

    Raises:
        OSError, NotImplementedError: it cannot be locked.
    """
    from filelock import FileLock, Timeout  # torch needs it, too

    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(f"{path} must be a file")
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock


def _remove(lock: BaseFileLock) -> None:
    """Release a claim, and remove its file while nobody else can have locked it."""
    if os.name == "nt":  # where no file that is open can be removed
        lock.release()
    with contextlib.suppress(OSError):
        os.unlink(lock.lock_file)
    lock.release()
