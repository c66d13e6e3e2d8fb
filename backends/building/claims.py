"""Claims: one of the servers that share a store builds a graph, the others wait for its file.

    STORE/.KEY.FINGERPRINT.claim     who builds it: process, token of the claim, machine's name

A claim is trusted for nothing but waiting: whoever waits too long, or cannot make one, builds. Its
owner touches it every few seconds. It is taken over once its owner has ended, or once it was not
touched for half a minute by the clock of who waits: clocks of two machines may differ. Servers with
different signing keys cannot use each other's files, so they do not wait for each other.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import platform
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..cleanup import owners
from ..errors import GraphFileError
from ..reasons import of
from ..storing.files import open_regular
from ..storing.signing import Signer

logger = logging.getLogger(__name__)

#: What is said of a graph that another server builds.
BY_ANOTHER_SERVER = of("compiled_elsewhere")
BEAT_S = 3.0
POLL_S = 0.5
STALE_S = 30.0
#: Age of a claim of another machine that nobody waits for.
_FORGOTTEN_S = 24 * 3600.0
_NAME = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{8}\.claim")
_TEXT = re.compile(rf"({owners.PATTERN}) ([0-9a-f]{{16}}) [^\n]*\n")
_LIMIT_BYTES = 512
_TRIES = 3


class _Claim(NamedTuple):
    """A claim's file: whose it is, and when it was touched; both None and "" of a half-written
    one.
    """

    owner: owners.Owner | None
    token: str
    touched_ns: int


@dataclass
class _Waiting:
    """A key that another server builds: since when this one waits, what it saw of the claim last
    and when that changed, by the monotonic clock.
    """

    since: float
    seen: _Claim
    changed: float
    then: Callable[[], object] | None


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
        self._held: dict[str, str] = {}  # keys, and the token of the claim on each
        self._waiting: dict[str, _Waiting] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._closing = threading.Event()
        self._process = os.getpid()
        self._warned = False

    def take(self, key: str, then: Callable[[], object]) -> bool:
        """Say whether to build a graph now.

        Args:
            key: the graph's key.
            then: called once if not: look for the file, and ask again if there is none.

        Returns:
            True: it is this server's to build, and to `release`. False: another server builds it.
        """
        try:
            path = self._path(key)
            for _ in range(_TRIES):
                if self._is_ours(key) or self._is_impatient(key) or self._make(key, path):
                    return True
                claim = _read(path)
                if claim is None:
                    continue  # it has just been released
                if not self._is_abandoned(key, claim) or not _removed(path, claim.token):
                    self._wait(key, claim, then)
                    return False
        except (OSError, GraphFileError) as error:
            if not self._warned:
                self._warned = True
                logger.info("Warmgraph: graphs are built whatever other servers build: %s", error)
        return True

    def release(self, key: str) -> None:
        """Let a graph go: its file is there, or its build has failed. Nothing if it is not held."""
        with self._news:
            self._waiting.pop(key, None)
            token = self._held.pop(key, None)
        if token is not None:
            with contextlib.suppress(OSError, GraphFileError):
                _remove(self._path(key), token)

    def sweep(self) -> None:
        """Remove the claims of servers that have ended."""
        before = time.time() - _FORGOTTEN_S
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if not _NAME.fullmatch(entry.name):
                    continue
                with contextlib.suppress(OSError):
                    claim = _read(Path(entry.path))
                    if claim is None:
                        continue
                    life = owners.life(claim.owner) if claim.owner else owners.Life.UNKNOWN
                    old = claim.touched_ns < before * 1e9
                    if life is owners.Life.ENDED or (life is owners.Life.UNKNOWN and old):
                        _remove(Path(entry.path), claim.token)

    def close(self) -> None:
        """Release everything; nothing that was waited for is told any more. Nothing in a fork."""
        if os.getpid() != self._process:
            return
        self._closing.set()
        with self._news:
            self._closed = True
            held = list(self._held)
            self._waiting.clear()
            self._news.notify_all()
        atexit.unregister(self.close)
        for key in held:
            self.release(key)

    def _path(self, key: str) -> Path:
        return self._folder / f".{key}.{self._signer.fingerprint}.claim"

    def _is_ours(self, key: str) -> bool:
        with self._news:
            return self._closed or key in self._held

    def _is_impatient(self, key: str) -> bool:
        """Whether this server has waited long enough; then it builds beside the other."""
        with self._news:
            waiting = self._waiting.get(key)
            if waiting is None or time.monotonic() - waiting.since < self._patience_s():
                return False
            del self._waiting[key]
        logger.info(
            "Warmgraph: another server takes long to build a graph; it is built here as well"
        )
        return True

    def _make(self, key: str, path: Path) -> bool:
        """Make the claim's file; False if there is one.

        Raises:
            OSError: there can be none here.
        """
        token = secrets.token_hex(8)
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            descriptor = os.open(path, flags, 0o666)
        except FileExistsError:
            return False
        except PermissionError:
            if os.path.lexists(path):  # Windows: it is being removed
                return False
            raise
        try:
            with os.fdopen(descriptor, "wb") as file:
                words = f"{owners.me()} {token} {platform.node()}\n"
                file.write(words.encode("utf-8", "replace")[:_LIMIT_BYTES])
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        with self._news:
            self._held[key] = token
            self._waiting.pop(key, None)
            self._watch()
        return True

    def _is_abandoned(self, key: str, claim: _Claim) -> bool:
        """Whether a claim's owner has ended, or does not touch it any more."""
        if claim.owner is not None and owners.life(claim.owner) is owners.Life.ENDED:
            return True
        now = time.monotonic()
        with self._news:
            waiting = self._waiting.get(key)
            if waiting is None:
                return False
            if waiting.seen != claim:
                waiting.seen, waiting.changed = claim, now
            return now - waiting.changed >= STALE_S

    def _wait(self, key: str, claim: _Claim, then: Callable[[], object]) -> None:
        now = time.monotonic()
        with self._news:
            waiting = self._waiting.setdefault(key, _Waiting(now, claim, now, then))
            waiting.then = then
            self._watch()

    # The thread that keeps this server's claims and looks at the others'.

    def _watch(self) -> None:
        """Have the thread run (under the lock)."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(
                target=self._keep_watch, name="warmgraph-claims", daemon=True
            )
            self._thread.start()
            atexit.register(self.close)
        self._news.notify_all()

    def _keep_watch(self) -> None:
        beaten = time.monotonic()
        while not self._closing.wait(POLL_S):
            with self._news:
                while not (self._held or self._waiting or self._closed):
                    self._news.wait()
                held = dict(self._held)
                waiting = [key for key, each in self._waiting.items() if each.then is not None]
            try:
                if time.monotonic() - beaten >= BEAT_S:
                    beaten = time.monotonic()
                    for key, token in held.items():
                        self._touch(key, token)
                for key in waiting:
                    if self._is_due(key):
                        self._tell(key)
            except Exception:
                logger.exception("Looking at the claims of other servers failed and goes on")

    def _touch(self, key: str, token: str) -> None:
        path = self._path(key)
        with contextlib.suppress(OSError):
            claim = _read(path)
            if claim is not None and claim.token == token:
                os.utime(path)

    def _is_due(self, key: str) -> bool:
        """Whether there is something to do about a key: no claim, an abandoned one, or it took too
        long.
        """
        with self._news:
            waiting = self._waiting.get(key)
        if waiting is None:
            return False
        if time.monotonic() - waiting.since >= self._patience_s():
            return True
        try:
            claim = _read(self._path(key))
        except OSError:
            return True
        return claim is None or self._is_abandoned(key, claim)

    def _tell(self, key: str) -> None:
        with self._news:
            waiting = self._waiting.get(key)
            if waiting is None or waiting.then is None or self._closed:
                return
            then, waiting.then = waiting.then, None  # how long it has waited stays known
        then()


def _read(path: Path) -> _Claim | None:
    """Read a claim; None if there is none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with open_regular(path) as file:
            touched = os.fstat(file.fileno()).st_mtime_ns
            text = file.read(_LIMIT_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    except PermissionError:
        if os.name != "nt":
            raise
        return _Claim(None, "", 0)  # it is being removed
    words = _TEXT.fullmatch(text)
    if words is None:
        return _Claim(None, "", touched)
    return _Claim(owners.parse(words[1]), words[2], touched)


def _removed(path: Path, token: str) -> bool:
    """Remove a claim as `_remove` does; False where it is open in another process (Windows)."""
    try:
        _remove(path, token)
    except PermissionError:
        if os.name != "nt":
            raise
        return False
    return True


def _remove(path: Path, token: str) -> None:
    """Remove a claim if it is still this one: another server may just have taken it over.

    Raises:
        OSError: it cannot be removed.
    """
    claim = _read(path)
    if claim is None or claim.token != token:
        return
    aside = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    try:
        moved = _read(aside)
        if moved is not None and moved.token != token:
            with contextlib.suppress(OSError):
                os.link(aside, path)  # give it back
    finally:
        aside.unlink(missing_ok=True)
