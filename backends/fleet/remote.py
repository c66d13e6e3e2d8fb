"""A store that machines share, beside the local one: read where a graph is missing, written where
one was built.

    URL/FINGERPRINT/KEY.safetensors      a graph, below the key that signed it
    URL/FINGERPRINT/KEY.claim            who builds it (`claims`)

Nothing in it is trusted: what comes is checked in the private folder as any file of the local store
is, and then put there. Nobody waits for a batch of graphs longer than the patience. A remote that
fails or is late is left alone for a minute. What comes late is put into the store all the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import GraphFileError
from ..reasons import NOTHING, Reason, of, with_remedy
from ..storing.graph_file import Fault, RefusedFileError, file_name
from ..storing.manifest import MAX_PAYLOAD_BYTES
from ..storing.signing import Signer
from ..storing.store import Store
from .crew import Crew
from .place import Place, open_place, private_folder
from .schemes import SCHEMES, scheme_of, secrets_of, told
from .settings import WRITE, FleetSettings

logger = logging.getLogger(__name__)

REST_S = 60.0
#: For how long a graph that is not there is not asked for again: at first, and at most. It doubles.
MISSED_S = 10.0
MOST_MISSED_S = 300.0
#: A whole file: the largest payload, and a header.
MOST_BYTES = MAX_PAYLOAD_BYTES + (8 << 20)
#: Files that are refused in a line of the log each; the others are counted.
SAID = 8
_DENIED = ("403", "401", "Forbidden", "AccessDenied", "Unauthorized")


@dataclass(eq=False)
class _Look:
    """One graph that is looked for; times are of the monotonic clock."""

    key: str
    then: Callable[[], object]
    started: float
    is_told: bool = False


class _Miss(NamedTuple):
    """A graph that was not there: for how long it is not asked for, and until when."""

    seconds: float
    until: float


class Remote:
    """One place. `fetch` and `push` return at once, from any thread; threads of its own work, which
    end with the process and hold nothing up.
    """

    def __init__(
        self,
        settings: FleetSettings,
        store: Store,
        signer: Signer,
        *,
        on_fault: Callable[[Reason], object] = lambda fault: None,
        rest_s: float = REST_S,
        missed_s: float = MISSED_S,
    ) -> None:
        """Set up; nothing is opened and no thread starts.

        Args:
            settings: where it is, and how it is used.
            store: what comes goes there.
            signer: below whose keys graphs lie.
            on_fault: told once whenever it begins to be left alone.
            rest_s: for how long it is left alone then.
            missed_s: for how long a graph that is not there is not asked for again, at first.
        """
        self._settings, self._store, self._signer = settings, store, signer
        self._on_fault, self._rest_s, self._missed_s = on_fault, rest_s, missed_s
        self._secrets = secrets_of(settings.remote, settings.options)
        self._opening = threading.Lock()
        self._place: Place | None = None
        self.crew = Crew()
        self._news = threading.Condition()
        # Guarded by the lock of `_news`.
        self._looks: dict[str, _Look] = {}
        self._missed: dict[str, _Miss] = {}
        self._sending: dict[str, list[Callable[[], None]]] = {}
        self._resting_until = 0.0
        self._answered = 0.0
        self._watched = False
        self._closed = False
        self._writes = settings.mode == WRITE and SCHEMES[self.scheme].writes
        self._no_push_until = 0.0
        #: found, missing, refused, late, failed, denied, sent, unsent.
        self.counts: Counter[str] = Counter()
        #: What went wrong last; it may be well again.
        self.fault: Reason = NOTHING

    # --- what it is like --------------------------------------------------------------------------

    @property
    def scheme(self) -> str:
        """What its URL begins with: all of it that reports say."""
        return scheme_of(self._settings.remote)

    @property
    def patience_s(self) -> float:
        """Seconds that a batch of graphs is waited for."""
        return self._settings.patience_s

    @property
    def writes(self) -> bool:
        """Whether anything may be sent there now."""
        with self._news:
            now = time.monotonic()
            return self._writes and not self._closed and now >= self._resting_until

    @property
    def is_resting(self) -> bool:
        """Whether it is left alone now."""
        with self._news:
            return self._closed or time.monotonic() < self._resting_until

    def report(self) -> dict[str, Any]:
        """Return what it is like as JSON-plain data, without its address."""
        with self._news:
            return {
                "scheme": self.scheme,
                "mode": WRITE if self._writes else "read",
                "resting": time.monotonic() < self._resting_until,
                "looking": len(self._looks),
                "sending": len(self._sending),
                "counts": dict(self.counts),
                "fault": self.fault.to_plain() if self.fault else None,
            }

    # --- what others ask --------------------------------------------------------------------------

    def fetch(self, key: str, then: Callable[[], object]) -> bool:
        """Look for a graph.

        Args:
            key: of the graph.
            then: called once, from any thread: it is in the local store, is known to be missing, or
                was waited for long enough.

        Returns:
            False where there is nothing to wait for; `then` is not called.
        """
        now = time.monotonic()
        with self._news:
            if self._closed or now < self._resting_until or key in self._looks:
                return False
            if key in self._missed and now < self._missed[key].until:
                return False
            # One patience for a whole batch: who comes while others wait has their time.
            begun = min((look.started for look in self._looks.values()), default=now)
            look = _Look(key, then, begun)
            self._looks[key] = look
            self._watch()
            self._news.notify_all()
        if not self.crew.put(partial(self._get, look)):
            self._fail(of("remote_late", seconds=self._seconds))
        return True

    def forget(self, key: str) -> None:
        """Look for a graph anew though it was not there."""
        with self._news:
            self._missed.pop(key, None)

    def push(self, path: Path, key: str) -> None:
        """Send a file that was signed here; where that fails, it is not sent."""
        with self._news:
            now = time.monotonic()
            if not self._writes or self._closed:
                return
            if max(self._resting_until, self._no_push_until) > now or key in self._sending:
                self.counts["unsent"] += 1
                return
            self._sending[key] = []
        if not self.crew.put(partial(self._put, path, key)):
            self._sent(key, "unsent")

    def after_push(self, key: str, task: Callable[[], None]) -> None:
        """Do something in one of its threads, when a graph is no longer on its way there."""
        with self._news:
            if key in self._sending:
                self._sending[key].append(task)
                return
        self.crew.put(task)

    def settle(self) -> None:
        """Wait until everybody was told who looks for something: not longer than the patience."""
        with self._news:
            while self._looks and not self._closed:
                self._news.wait()

    def flush(self, limit_s: float) -> bool:
        """Wait for what is being sent; says whether all of it is. For commands, which end then."""
        until = time.monotonic() + limit_s
        with self._news:
            while self._sending and (left := until - time.monotonic()) > 0:
                self._news.wait(left)
            return not self._sending

    def close(self) -> None:
        """Tell nobody any more; nothing is waited for."""
        with self._news:
            self._closed = True
            self._looks.clear()
            self._news.notify_all()
        self.crew.close()

    # --- its threads ------------------------------------------------------------------------------

    def open(self) -> Place:
        """Return the place; may take long the first time."""
        with self._opening:
            if self._place is None:
                self._place = open_place(self._settings.remote, self._settings.options)
            return self._place

    def words(self, error: BaseException) -> str:
        """An error in a line that gives neither address nor credentials away."""
        return told(error, self._secrets)

    def rest(self, error: BaseException) -> None:
        """Leave it alone for a while, for what one of its libraries said."""
        self._fail(of("remote_failed", error=self.words(error)))

    def rest_late(self) -> None:
        """Leave it alone for a while: it does not answer."""
        self.crew.renew()
        self._fail(of("remote_late", seconds=self._seconds))

    def _get(self, look: _Look) -> None:
        if look.is_told and self.is_resting:
            return
        try:
            place = self.open()
            found = any(self._take(place, name, look.key) for name in self._signer.readable)
        except Exception as error:  # whatever a library raises
            self.counts["failed"] += 1
            self.rest(error)
        else:
            self.counts["found" if found else "missing"] += 1
            with self._news:
                self._answered = time.monotonic()
                if not found:
                    before = self._missed.get(look.key)
                    wait = min(2 * before.seconds, MOST_MISSED_S) if before else self._missed_s
                    self._missed[look.key] = _Miss(wait, self._answered + wait)
        self._tell(look)

    def _take(self, place: Place, fingerprint: str, key: str) -> bool:
        """Have a graph that lies below a key's name in the store, if it does and is well."""
        name = file_name(key)
        with private_folder(self._store.spool) as folder:
            draft = folder / name
            try:
                place.fetch(f"{fingerprint}/{name}", draft, MOST_BYTES)
            except FileNotFoundError:
                return False
            except GraphFileError as error:
                self._refuse(name, error)
                return False
            except PermissionError as error:  # S3 says so of what is missing, too
                self.counts["denied"] += 1
                self._note(of("remote_denied", error=self.words(error)))
                return False
            try:
                self._store.take_in(draft)
            except GraphFileError as error:
                self._refuse(name, error)
                return False
        return True

    def _refuse(self, name: str, error: GraphFileError) -> None:
        with self._news:
            self.counts["refused"] += 1
            is_one_of_many = self.counts["refused"] > SAID
        if not is_one_of_many:
            self._note(refused(name, error))

    def _put(self, path: Path, key: str) -> None:
        count = "unsent"
        try:
            self.open().write(f"{self._signer.fingerprint}/{file_name(key)}", path.read_bytes())
            count = "sent"
        except Exception as error:  # whatever a library raises; reads go on in any case
            denied = isinstance(error, PermissionError) or any(w in str(error) for w in _DENIED)
            words = self.words(error)
            with self._news:
                self._no_push_until = time.monotonic() + self._rest_s
                self._writes &= not denied
            self._note(of("remote_read_only" if denied else "remote_unsent", error=words))
        self._sent(key, count)

    def _sent(self, key: str, count: str) -> None:
        with self._news:
            self.counts[count] += 1
            tasks = self._sending.pop(key, [])
            self._news.notify_all()
        for task in tasks:
            task()

    def _note(self, fault: Reason) -> None:
        """Say something once, as long as nothing else is to be said."""
        with self._news:
            is_new, self.fault = fault != self.fault, fault
        if is_new:
            logger.warning("Warmgraph: %s", fault)
            self._on_fault(fault)

    def _fail(self, fault: Reason) -> None:
        """Leave it alone; all who wait go on."""
        with self._news:
            first = time.monotonic() >= self._resting_until and not self._closed
            self._resting_until = time.monotonic() + self._rest_s
            self.fault = fault
            looks = list(self._looks.values())
        if first:
            logger.warning("Warmgraph: %s", with_remedy(fault, self._left_alone))
            self._on_fault(fault)
        for look in looks:
            self._tell(look)

    @property
    def _left_alone(self) -> Reason:
        return of("do_nothing_remote", seconds=f"{self._rest_s:g}")

    @property
    def _seconds(self) -> str:
        return f"{self.patience_s:g}"

    def _tell(self, look: _Look) -> None:
        with self._news:
            if look.is_told or self._closed:
                return
            look.is_told = True
        try:
            look.then()
        except Exception:  # whoever listens; the others are told all the same
            logger.exception("Warmgraph: nobody goes on with a graph of the remote store")
        with self._news:  # only now: who settles relies on what `then` began
            if self._looks.get(look.key) is look:
                del self._looks[look.key]
            self._news.notify_all()

    def _watch(self) -> None:
        """Have the thread run that tells those whose time is over (under the lock)."""
        if not self._watched:
            self._watched = True
            threading.Thread(
                target=self._keep_watch, name="warmgraph-remote-watch", daemon=True
            ).start()

    def _keep_watch(self) -> None:
        while True:
            with self._news:
                if self._closed:
                    return
                waiting = [look for look in self._looks.values() if not look.is_told]
                first = min((look.started for look in waiting), default=None)
                if first is None:
                    self._news.wait()
                    continue
                left = first + self.patience_s - time.monotonic()
                if left > 0:
                    self._news.wait(left)
                    continue
                is_well = self._answered > first
                self.counts["late"] += len(waiting)
            if is_well:  # it is slow only: they go on, and what is on its way still comes
                for look in waiting:
                    self._tell(look)
            else:
                self.rest_late()


def refused(name: str, error: GraphFileError) -> Reason:
    """Say why a file of the remote is not used, without the private folder that it was read in."""
    if not isinstance(error, RefusedFileError):
        return of("remote_refused", name=name, what=error.reason)
    whole = of("remote_refused", name=name, what=error.what)
    untrusted = error.fault is Fault.UNTRUSTED
    return with_remedy(whole, of("do_trust_key") if untrusted else NOTHING)
