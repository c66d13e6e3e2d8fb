"""A store that machines share: the local one mirrors what it has of a target at the engine's start,
and what is built here is sent there.

    URL/FINGERPRINT/TARGET/KEY.safetensors    a graph, below the key that signed it and its target
    URL/FINGERPRINT/KEY.claim                 who builds it (`claims`)

What came there later is asked for by its name. Nothing in it is trusted: what comes is checked in
the private folder as any file of the local store is, and then put there. Nobody waits longer than
the patience; what comes later is kept all the same. A remote that fails, or does not answer in
time, is left alone for a minute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ..errors import GraphFileError
from ..reasons import NOTHING, Reason, of, with_remedy
from ..storing.graph_file import Fault, RefusedFileError, file_name, key_of
from ..storing.manifest import MAX_PAYLOAD_BYTES
from ..storing.signing import Signer
from ..storing.store import Store
from .place import StorePlace, open_place, private_folder
from .pool import DaemonPool
from .schemes import SCHEMES, scheme_of, secrets_of, told
from .settings import READ, WRITE, FleetSettings

logger = logging.getLogger(__name__)

REST_S = 60.0
#: Until a graph that is not there is asked for again: at first, and at most. It doubles.
MISSED_S = 10.0
MOST_MISSED_S = 300.0
#: A whole file: the largest payload, and a header.
MOST_BYTES = MAX_PAYLOAD_BYTES + (8 << 20)
#: Files that are refused in a line of the log each; the others are counted.
SAID = 8
_DENIED = ("403", "401", "Forbidden", "AccessDenied", "Unauthorized")


class Remote:
    """One place. Requests are made in a pool, whose threads end with the process and hold nothing
    up; whoever waits for one is told when its time is over, too.
    """

    def __init__(
        self,
        settings: FleetSettings,
        store: Store,
        signer: Signer,
        *,
        on_fault: Callable[[Reason], object] = lambda fault: None,
        missed_s: float = MISSED_S,
    ) -> None:
        """Set up; nothing is opened and no thread starts.

        Args:
            settings: where it is, and how it is used.
            store: what comes goes there.
            signer: below whose keys graphs lie.
            on_fault: told once of each fault.
            missed_s: seconds until a graph that is not there is asked for again, at first.
        """
        self._settings, self._store, self._signer = settings, store, signer
        self._on_fault, self._missed_s = on_fault, missed_s
        self.scheme = scheme_of(settings.remote)
        #: Whether files may be sent there, as far as is known.
        self.writes = settings.mode == WRITE and SCHEMES[self.scheme].writes
        self._secrets = secrets_of(settings.remote, settings.options)
        self._pool = DaemonPool()
        self._news = threading.Condition()
        # Guarded by the lock of `_news`: targets that are listed, keys that are fetched, what is
        # sent and what is done then; how long a key is not asked for, and until when; when a target
        # was listed, and what was there.
        self._listing: set[str] = set()
        self._coming: set[str] = set()
        self._mirroring = self._looking = 0
        self._sending: dict[str, list[Callable[[], object]]] = {}
        self._missed: dict[str, tuple[float, float]] = {}
        self._listed: dict[str, tuple[float, set[str]]] = {}
        self._answered = self._rests_until = 0.0
        self._closed = False
        #: found, refused, failed, sent, unsent, taken over.
        self.counts: Counter[str] = Counter()
        #: What went wrong last; it may be well again.
        self.fault: Reason = NOTHING

    @cached_property
    def place(self) -> StorePlace:
        """Where files lie; may take long the first time."""
        return open_place(self._settings.remote, self._settings.options)

    @property
    def is_resting(self) -> bool:
        """Whether it is left alone now."""
        return self._closed or time.monotonic() < self._rests_until

    def report(self) -> dict[str, Any]:
        """Return what it is like as JSON-plain data, without its address."""
        with self._news:
            return {
                "scheme": self.scheme,
                "mode": WRITE if self.writes else READ,
                "looking": self._looking,
                "sending": len(self._sending),
                "counts": dict(self.counts),
                "fault": self.fault.to_plain() if self.fault else None,
            }

    # --- what others ask; each returns at once ----------------------------------------------------

    def ask(self, task: Callable[[], bool], then: Callable[[bool | None], object]) -> None:
        """Have something asked of the place.

        Args:
            task: asks it, and may hang or raise whatever the place's library does.
            then: takes its answer; None where it failed, or nobody waits any longer.
        """
        begun, first = time.monotonic(), threading.Lock()

        def tell(answer: bool | None) -> None:
            if first.acquire(blocking=False) and not self._closed:
                clock.cancel()
                then(answer)

        def give_up() -> None:
            if self._answered < begun:  # else it is slow only
                self.fail()
            tell(None)

        def run() -> None:
            try:
                answer = task()
                self._answered = time.monotonic()
            except Exception as error:  # whatever a library raises
                self.fail(error)
                answer = None
            tell(answer)

        clock = threading.Timer(self._settings.patience_s, give_up)
        clock.name = "warmgraph-remote-clock"
        clock.daemon = True
        clock.start()
        self._pool.put(run)

    def mirror(self, target: str) -> None:
        """Have in the store what lies below a target, as far as the place tells what does."""
        with self._news:
            self._listing.add(target)
            self._mirroring += 1
        self._pool.put(partial(self._mirror, target))

    def look(self, key: str, target: str, then: Callable[[], object]) -> bool:
        """Look for a graph.

        Args:
            key, target: of the graph.
            then: called once, from any thread: it is in the local store, is known to be missing, or
                was waited for long enough.

        Returns:
            False where there is nothing to wait for; `then` is not called.
        """
        now = time.monotonic()
        with self._news:
            pause, due = self._missed.get(key, (self._missed_s, 0.0))
            if now < due or self.is_resting:
                return False
            self._missed[key] = min(2 * pause, MOST_MISSED_S), now + pause
            self._looking += 1

        def tell(_: bool | None) -> None:
            try:
                then()
            finally:  # only now: who settles relies on what `then` began
                with self._news:
                    self._looking -= 1
                    self._news.notify_all()

        self.ask(partial(self._look, key, target), tell)
        return True

    def push(self, path: Path, key: str, target: str) -> None:
        """Send a file that was signed here; where that fails, it is not sent."""
        with self._news:
            if not self.writes or key in self._sending:
                return
            if self.is_resting:
                self.counts["unsent"] += 1
                return
            self._sending[key] = []
        self._pool.put(partial(self._put, path, key, target))

    def after_push(self, key: str, task: Callable[[], object]) -> None:
        """Do something in one of its threads, when a graph is no longer on its way there."""
        with self._news:
            if key in self._sending:
                self._sending[key].append(task)
                return
        self._pool.put(task)

    def fail(self, error: BaseException | None = None) -> None:
        """Leave the store alone for a while: its library failed, or nothing answered."""
        self._rests_until = time.monotonic() + REST_S
        self._count("failed")
        late = of("remote_late", seconds=f"{self._settings.patience_s:g}")
        remedy = of("do_nothing_remote", seconds=f"{REST_S:g}")
        self._note(late if error is None else self._failed(error), remedy)

    def close(self) -> None:
        """Tell nobody any more; nothing is waited for."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._pool.close()

    # --- what waits -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until everybody was told who looks for something: not longer than the patience."""
        with self._news:
            while self._looking and not self._closed:
                self._news.wait()

    def finish(self) -> bool:
        """Wait for all that is under way, for commands; False where nothing comes any more."""
        with self._news:
            while self._mirroring or self._sending:
                if not self._news.wait(self._settings.patience_s):
                    return False
        return True

    def take(self, key: str, target: str) -> bool:
        """Have one graph in the store, below whichever key's name it lies.

        Raises:
            Exception: whatever the place's library raises.
        """
        return any(self._take(f"{signer}/{target}", key) for signer in self._signer.readable)

    # --- in the pool ------------------------------------------------------------------------------

    def _mirror(self, target: str) -> None:
        try:
            for folder, key in self._list(target):
                self._take(folder, key)
        except Exception as error:  # whatever a library raises
            self.fail(error)
        with self._news:
            self._listing.discard(target)
            self._mirroring -= 1
            self._news.notify_all()

    def _list(self, target: str) -> list[tuple[str, str]]:
        """Return the folders and keys of what lies below a target."""
        found: list[tuple[str, str]] = []
        is_full = self._store.is_full  # then only what is asked for comes
        try:
            for fingerprint in () if is_full else self._signer.readable:
                names = self.place.names(f"{fingerprint}/{target}")
                keys = filter(None, (key_of(Path(name)) for name in names))
                found += [(f"{fingerprint}/{target}", key) for key in keys]
            is_told = SCHEMES[self.scheme].lists and not is_full
        except Exception as error:  # whatever a library raises
            if not _is_denied(error):
                raise
            is_told = False
            if SCHEMES[self.scheme].lists:  # else that is usual
                self._note(self._failed(error))
        with self._news:
            self._answered = time.monotonic()
            self._listing.discard(target)
            if is_told:
                self._listed[target] = self._answered, {key for _, key in found}
            self._news.notify_all()
        return found

    def _look(self, key: str, target: str) -> bool:
        """Have a graph that may be about to come."""
        with self._news:
            self._news.wait_for(lambda: target not in self._listing, self._settings.patience_s)
            listed, keys = self._listed.get(target, (0.0, {key}))
        is_missing = key not in keys and time.monotonic() < listed + self._missed_s
        return not is_missing and self.take(key, target)

    def _take(self, folder: str, key: str) -> bool:
        with self._news:
            self._news.wait_for(lambda: key not in self._coming, self._settings.patience_s)
            if self._closed or self._store.has(key):
                return True
            self._coming.add(key)
        try:
            return self._fetch(folder, file_name(key))
        finally:
            with self._news:
                self._coming.discard(key)
                self._news.notify_all()

    def _fetch(self, folder: str, file: str) -> bool:
        with private_folder(self._store.spool) as private:
            draft = private / file
            try:
                self.place.fetch(f"{folder}/{file}", draft, MOST_BYTES)
                self._store.take_in(draft)
            except FileNotFoundError:
                return False
            except PermissionError as error:  # S3 says so of what is missing, too
                self._note(self._failed(error))
                return False
            except GraphFileError as error:
                self._count("refused")
                if self.counts["refused"] <= SAID:
                    self._note(refused(file, error))
                return False
        self._count("found")
        return True

    def _put(self, path: Path, key: str, target: str) -> None:
        count = "unsent"
        try:
            name = f"{self._signer.fingerprint}/{target}/{file_name(key)}"
            self.place.write(name, path.read_bytes())
            count = "sent"
        except Exception as error:  # whatever a library raises; reads go on in any case
            self.writes &= not _is_denied(error)
            self._note(of("remote_unsent", error=told(error, self._secrets)))
        with self._news:
            tasks = self._sending.pop(key)
        self._count(count)
        for task in tasks:
            task()

    def _count(self, what: str) -> None:
        with self._news:
            self.counts[what] += 1
            self._news.notify_all()

    def _note(self, fault: Reason, remedy: Reason = NOTHING) -> None:
        """Say something once, as long as nothing else is to be said."""
        with self._news:
            is_new, self.fault = fault != self.fault and not self._closed, fault
        if is_new:
            logger.warning("Warmgraph: %s", with_remedy(fault, remedy))
            self._on_fault(fault)

    def _failed(self, error: BaseException) -> Reason:
        """An error, without an address or credentials."""
        return of("remote_failed", error=told(error, self._secrets))


def _is_denied(error: BaseException) -> bool:
    return isinstance(error, PermissionError) or any(word in str(error) for word in _DENIED)


def refused(name: str, error: GraphFileError) -> Reason:
    """Say why a file of the remote is not used, without the private folder that it was read in."""
    if not isinstance(error, RefusedFileError):
        return of("remote_refused", name=name, what=error.reason)
    whole = of("remote_refused", name=name, what=error.what)
    untrusted = error.fault is Fault.UNTRUSTED
    return with_remedy(whole, of("do_trust_key") if untrusted else NOTHING)
