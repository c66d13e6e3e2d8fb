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
from pathlib import Path
from typing import TYPE_CHECKING

from ..reasons import of
from ..storing.signing import Signer

if TYPE_CHECKING:
    from filelock import BaseFileLock

logger = logging.getLogger(__name__)

#: What is said of a graph that another server builds.
BY_ANOTHER_SERVER = of("compiled_elsewhere")
#: Between two looks at a claim of another server.
POLL_S = 0.25
_NAME = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{8}\.claim")
#: What is raised where there can be no lock: a folder in its place, a file system without them.
_NO_LOCKS = (OSError, NotImplementedError)


class Claims:
    """The claims of one server process on graphs of one store. Any thread may call; none waits."""

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
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._held: dict[str, BaseFileLock] = {}
        #: Since when a graph of another server is waited for, by the monotonic clock.
        self._waiting: dict[str, float] = {}
        self._closed = False
        self._warned = False

    def take(self, key: str, target: str = "") -> bool:
        """Say whether to build a graph now.

        Args:
            key: the graph's key.
            target: the name of the graph's target, for who shares more than a store.

        Returns:
            True: it is this server's to build, if its file has not come meanwhile, and to
            `release`. False: another server builds it; ask again in `POLL_S`.
        """
        with self._lock:
            if self._closed or key in self._held or self._is_impatient(key):
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
            if lock is None:
                self._waiting.setdefault(key, time.monotonic())
                return False
            self._waiting.pop(key, None)
            self._held[key] = lock
            return True

    def release(self, key: str) -> None:
        """Let a graph go: its file is there, or its build has failed. Nothing if it is not held."""
        with self._lock:
            self._waiting.pop(key, None)
            lock = self._held.pop(key, None)
        if lock is not None:
            _remove(lock)

    def sweep(self) -> None:
        """Remove the files of servers that have ended."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with contextlib.suppress(*_NO_LOCKS):
                        if (lock := _lock(Path(entry.path))) is not None:
                            _remove(lock)

    def close(self) -> None:
        """Release everything; whoever still asks builds."""
        with self._lock:
            self._closed = True
            held = list(self._held)
        for key in held:
            self.release(key)

    def _path(self, key: str) -> Path:
        return self._folder / f".{key}.{self._signer.fingerprint}.claim"

    def _is_impatient(self, key: str) -> bool:
        """Whether this server has waited long enough; then it builds beside the other (under the
        lock).
        """
        since = self._waiting.get(key)
        if since is None or time.monotonic() - since < self._patience_s():
            return False
        del self._waiting[key]
        logger.info(
            "Warmgraph: another server takes long to build a graph; it is built here as well"
        )
        return True


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
        if not path.exists():  # older filelocks take a folder that refuses the file for a lock
            raise PermissionError(f"{path} cannot be made") from None
        return None
    return lock


def _remove(lock: BaseFileLock) -> None:
    """Release a claim, and remove its file while nobody else can have locked it."""
    if os.name == "nt":  # where no file that is open can be removed
        lock.release()
    with contextlib.suppress(OSError):
        os.unlink(lock.lock_file)
    lock.release()
