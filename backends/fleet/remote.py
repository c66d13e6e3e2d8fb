"""A store that machines share: the local one mirrors what it has of a target when the server
starts, and what is built here is sent there.

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
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import GraphFileError
from ..reasons import NOTHING, Reason, of, with_remedy
from ..storing.graph_file import Fault, RefusedFileError, file_name, key_of
from ..storing.manifest import MAX_PAYLOAD_BYTES
from ..storing.signing import Signer
from ..storing.store import Store
from .place import Place, open_place, private_folder
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
Then = Callable[[], object]


class Remote:
    """One place. All but `take`, `settle` and `finish` return at once, from any thread: requests
    are made in a pool, whose threads hold nothing up.
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
        #: Seconds that anybody waits for it.
        self.patience_s = settings.patience_s
        #: Whether files may be sent there, as far as is known.
        self.writes = settings.mode == WRITE and SCHEMES[self.scheme].writes
        self._secrets = secrets_of(settings.remote, settings.options)
        self._opening = threading.Lock()
        self._place: Place | None = None
        self.pool = DaemonPool()
        self._news = threading.Condition()
        # Guarded by the lock of `_news`. What is under way: targets, which are listed, and names of
        # graphs; who waits for which name; for how long one is not asked for, and until when.
        self._coming: set[str] = set()
        self._waiting: dict[str, list[Then]] = {}
        self._missed: dict[str, tuple[float, float]] = {}
        self._sending: dict[str, list[Then]] = {}
        self._telling = 0
        self._clock: threading.Timer | None = None
        self._answered = self._closed = False
        self._rests_until = 0.0
        #: found, refused, late, failed, sent, unsent, taken over.
        self.counts: Counter[str] = Counter()
        #: What went wrong last; it may be well again.
        self.fault: Reason = NOTHING

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
                "looking": len(self._coming),
                "sending": len(self._sending),
                "counts": dict(self.counts),
                "fault": self.fault.to_plain() if self.fault else None,
            }

    def mirror(self, target: str) -> None:
        """Have in the store what lies below a target, as far as the place tells what does."""
        with self._news:
            self._begin(target, partial(self._list, target))

    def look(self, key: str, target: str, then: Then) -> bool:
        """Look for a graph.

        Args:
            key, target: of the graph.
            then: called once, from any thread: it is in the local store, is known to be missing, or
                was waited for long enough.

        Returns:
            False where there is nothing to wait for; `then` is not called.
        """
        name = f"{target}/{file_name(key)}"
        with self._news:
            if self._coming.isdisjoint((target, name)):
                if self.is_resting or not self._is_due(name):
                    return False
                self._begin(name, partial(self._get, name))
            if self._clock is None:  # it takes longer than anybody waits
                return False
            self._waiting.setdefault(name, []).append(then)
            return True

    def take(self, key: str, target: str) -> bool:
        """Have one graph in the store now, if it is there and well.

        Raises:
            Exception: whatever the place's library raises.
        """
        return self._take(f"{target}/{file_name(key)}")

    def push(self, path: Path, key: str, target: str) -> None:
        """Send a file that was signed here; where that fails, it is not sent."""
        with self._news:
            if not self.writes or key in self._sending:
                return
            if self.is_resting:
                self.counts["unsent"] += 1
                return
            self._sending[key] = []
        self.pool.put(partial(self._put, path, key, target))

    def after_push(self, key: str, task: Then) -> None:
        """Do something in one of its threads, when a graph is no longer on its way there."""
        with self._news:
            if key in self._sending:
                self._sending[key].append(task)
                return
        self.pool.put(task)

    def settle(self) -> None:
        """Wait until everybody was told who looks for something: not longer than the patience."""
        with self._news:
            while (self._waiting or self._telling) and not self._closed:
                self._news.wait()

    def finish(self) -> bool:
        """Wait for all that is under way, for commands; False where nothing comes any more."""
        with self._news:
            while self._coming or self._sending:
                if not self._news.wait(self.patience_s):
                    return False
        return True

    def close(self) -> None:
        """Tell nobody any more; nothing is waited for."""
        with self._news:
            self._closed = True
            self._waiting.clear()
            self._end(self._coming)
        self.pool.close()

    def open(self) -> Place:
        """Return the place; may take long the first time."""
        with self._opening:
            if self._place is None:
                self._place = open_place(self._settings.remote, self._settings.options)
            return self._place

    def fail(self, error: BaseException | None = None) -> None:
        """Leave it alone for a while: for what one of its libraries said, or as it says nothing."""
        with self._news:
            self.counts["failed"] += 1
            self._rests_until = time.monotonic() + REST_S
            self._end(self._coming)
            waiting = list(self._waiting)
        if error is None:
            fault = of("remote_late", seconds=f"{self.patience_s:g}")
        else:
            fault = self._failed(error)
        self._note(fault, of("do_nothing_remote", seconds=f"{REST_S:g}"))
        self._tell(waiting)

    # --- what is under way ------------------------------------------------------------------------

    def _begin(self, what: str, task: Then) -> None:
        """Have something come, and tell who waits when time is over (under the lock)."""
        if not self._coming:
            self._answered = False
            self._clock = threading.Timer(self.patience_s, self._time_is_over)
            self._clock.name, self._clock.daemon = "warmgraph-remote-clock", True
            self._clock.start()
        self._coming.add(what)
        self.pool.put(task)

    def _is_due(self, name: str) -> bool:
        """Whether to ask for a graph; not again soon, if so (under the lock)."""
        now, (pause, due) = time.monotonic(), self._missed.get(name, (self._missed_s, 0.0))
        if now >= due:
            self._missed[name] = min(2 * pause, MOST_MISSED_S), now + pause
        return now >= due

    def _end(self, names: Iterable[str]) -> None:
        """Something is not under way any more (under the lock)."""
        self._coming = self._coming.difference(names)
        if not self._coming and self._clock is not None:
            self._clock.cancel()
            self._clock = None
        self._news.notify_all()

    def _time_is_over(self) -> None:
        with self._news:
            if self._clock is not threading.current_thread():
                return
            self._clock, waiting = None, list(self._waiting)
            self.counts["late"] += len(waiting)
        if self._answered:  # it is slow only: what is on its way still comes
            self._tell(waiting)
        else:
            self.fail()

    def _tell(self, names: Iterable[str]) -> None:
        with self._news:
            thens = [then for name in names for then in self._waiting.pop(name, ())]
            self._telling += 1
        for then in thens:
            try:
                then()
            except Exception:  # whoever listens; the others are told all the same
                logger.exception("Warmgraph: nobody goes on with a graph of the remote store")
        with self._news:  # only now: who settles relies on what `then` began
            self._telling -= 1
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

    # --- the pool ---------------------------------------------------------------------------------

    def _list(self, target: str) -> None:
        """Fetch what lies below a target and is not here, or is waited for; the latter first."""
        files: list[str] = []
        is_told = SCHEMES[self.scheme].lists
        try:
            if not self._store.is_full:
                for fingerprint in self._signer.readable:
                    files += self.open().names(f"{fingerprint}/{target}")
            self._answered = True
        except Exception as error:  # whatever a library raises
            if not _is_denied(error):
                self.fail(error)
                return
            if is_told:
                self._note(self._failed(error))
            is_told = False
        keys = {file: key_of(Path(file)) for file in files}
        absent = [f"{target}/{f}" for f, key in keys.items() if key and not self._store.find(key)]
        with self._news:
            wanted = {name for name in self._waiting if name.startswith(f"{target}/")}
            missing = wanted.difference(absent) if is_told else set()
            for name in missing:
                self._is_due(name)
            first = sorted(wanted - missing)
            new = [n for n in dict.fromkeys([*first, *absent]) if n not in self._coming]
            self._coming.update(new)
            self._end([target])
        for name in new:
            self.pool.put(partial(self._get, name))
        self._tell(missing)

    def _get(self, name: str) -> None:
        if name not in self._coming:  # the remote has failed meanwhile
            return
        try:
            self._take(name)
            self._answered = True
        except Exception as error:  # whatever a library raises
            self.fail(error)
        with self._news:
            self._end([name])
        self._tell([name])

    def _take(self, name: str) -> bool:
        """Have a graph in the store, below whichever key's name it lies."""
        return any(self._take_in(fingerprint, name) for fingerprint in self._signer.readable)

    def _take_in(self, fingerprint: str, name: str) -> bool:
        file = name.rpartition("/")[2]
        with private_folder(self._store.spool) as folder:
            try:
                self.open().fetch(f"{fingerprint}/{name}", folder / file, MOST_BYTES)
                self._store.take_in(folder / file)
            except FileNotFoundError:
                return False
            except PermissionError as error:  # S3 says so of what is missing, too
                self._note(self._failed(error))
                return False
            except GraphFileError as error:
                with self._news:
                    self.counts["refused"] += 1
                if self.counts["refused"] <= SAID:
                    self._note(refused(file, error))
                return False
        with self._news:
            self.counts["found"] += 1
        return True

    def _put(self, path: Path, key: str, target: str) -> None:
        count = "unsent"
        try:
            name = f"{self._signer.fingerprint}/{target}/{file_name(key)}"
            self.open().write(name, path.read_bytes())
            count = "sent"
        except Exception as error:  # whatever a library raises; reads go on in any case
            self.writes &= not _is_denied(error)
            self._note(of("remote_unsent", error=told(error, self._secrets)))
        with self._news:
            self.counts[count] += 1
            tasks = self._sending.pop(key)
            self._news.notify_all()
        for task in tasks:
            task()


def _is_denied(error: BaseException) -> bool:
    return isinstance(error, PermissionError) or any(word in str(error) for word in _DENIED)


def refused(name: str, error: GraphFileError) -> Reason:
    """Say why a file of the remote is not used, without the private folder that it was read in."""
    if not isinstance(error, RefusedFileError):
        return of("remote_refused", name=name, what=error.reason)
    whole = of("remote_refused", name=name, what=error.what)
    untrusted = error.fault is Fault.UNTRUSTED
    return with_remedy(whole, of("do_trust_key") if untrusted else NOTHING)
