"""Claims in a remote store: of the machines that share one, one builds a graph.

    URL/FINGERPRINT/KEY.claim        a token of who builds it, and how often that was renewed

They come after the claims of the local store, which is shared within a machine. As those, they are
trusted for nothing but waiting: whoever waits too long, or cannot make one, builds. A claim is
taken over once it was not renewed for a minute, by the clock of who waits. Who knows of another's
claim builds once nothing was heard of it for two: a request that fails says nothing of it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..building.claims import Claims
from ..storing.manifest import is_key
from ..storing.signing import Signer
from .place import small
from .remote import REST_S, Remote

logger = logging.getLogger(__name__)

POLL_S = 2.0
BEAT_S = 15.0
STALE_S = 60.0


@dataclass
class _Held:
    """A claim of ours."""

    token: str = field(default_factory=partial(secrets.token_hex, 8))
    beats: int = 0

    def text(self) -> bytes:
        return f"{self.token} {self.beats}\n".encode()


@dataclass(eq=False)
class _Awaited:
    """A graph that is to be claimed, or that another machine builds; by the monotonic clock."""

    key: str
    then: Callable[[], object]
    since: float
    ours: _Held = field(default_factory=_Held)
    answered: bool = False
    seen: bytes = b""
    changed: float = 0.0
    looks_at: float = 0.0
    heard: float = 0.0


class FleetClaims(Claims):
    """The claims of a server on graphs of its own store, and then of the remote one."""

    def __init__(
        self,
        folder: Path,
        signer: Signer,
        remote: Remote,
        *,
        spool: Path,
        patience_s: Callable[[], float],
        poll_s: float = POLL_S,
        beat_s: float = BEAT_S,
        stale_s: float = STALE_S,
    ) -> None:
        """Set up; nothing is read or made.

        Args:
            folder, signer, patience_s: see `Claims`.
            remote: where claims of machines lie.
            spool: in the private folder, for what is read.
            poll_s, beat_s, stale_s: seconds between looks, renewals, and until one is taken over.
        """
        super().__init__(folder, signer, patience_s=patience_s)
        self._remote, self._spool = remote, spool
        self._key, self._limit_s = signer, patience_s
        self._poll_s, self._beat_s, self._stale_s = poll_s, beat_s, stale_s
        self._remote_news = threading.Condition()
        # Guarded by the lock of `_remote_news`.
        self._awaited: dict[str, _Awaited] = {}
        self._claimed: dict[str, _Held] = {}
        self._given_up: set[str] = set()
        self._minder: threading.Thread | None = None
        self._ended = False
        self._unclaimed_until = 0.0

    def take(self, key: str, then: Callable[[], object]) -> bool:
        """See `Claims`; False also while the remote store is asked."""
        if not super().take(key, then):
            return False
        now = time.monotonic()
        alone = not self._remote.writes or now < self._unclaimed_until
        with self._remote_news:
            if key in self._given_up:
                self._given_up.discard(key)
                return True
            if alone or key in self._claimed or self._ended:
                return True
            awaited = self._awaited.setdefault(key, _Awaited(key, then, now, changed=now))
            awaited.then = then
            self._mind()
            self._remote_news.notify_all()
        self._remote.crew.put(partial(self._ask, awaited))
        return False

    def release(self, key: str) -> None:
        """See `Claims`; the remote claim goes once the graph is sent."""
        super().release(key)
        with self._remote_news:
            self._awaited.pop(key, None)
            self._given_up.discard(key)
            held = self._claimed.pop(key, None)
        if held is not None:
            self._remote.after_push(key, partial(self._remove, key, held))

    def close(self) -> None:
        """See `Claims`."""
        with self._remote_news:
            self._ended = True
            held = list(self._claimed)
            self._awaited.clear()
            self._remote_news.notify_all()
        for key in held:
            self.release(key)
        self._remote.close()
        super().close()

    # --- in the remote's threads ------------------------------------------------------------------

    def _name(self, key: str) -> str:
        assert is_key(key)
        return f"{self._key.fingerprint}/{key}.claim"

    def _ask(self, awaited: _Awaited) -> None:
        """Create the claim, or learn that another machine has it."""
        try:
            self._remote.open().create(self._name(awaited.key), awaited.ours.text())
        except FileExistsError:
            awaited.answered, awaited.heard = True, time.monotonic()
            return
        except Exception as error:  # whatever a library raises
            with self._remote_news:
                said = self._unclaimed_until > 0
                self._unclaimed_until = time.monotonic() + REST_S
            if not said:
                logger.info(
                    "Warmgraph: graphs are built whatever other machines build: %s",
                    self._remote.words(error),
                )
            self._resolve(awaited, None)
            return
        self._won(awaited)

    def _won(self, awaited: _Awaited) -> None:
        self._remote.forget(awaited.key)  # it may have come since it was looked for
        if not self._resolve(awaited, awaited.ours):
            self._remove(awaited.key, awaited.ours)

    def _resolve(self, awaited: _Awaited, held: _Held | None, build: bool = True) -> bool:
        """Tell who waits; False where nobody does any more."""
        with self._remote_news:
            if self._awaited.get(awaited.key) is not awaited:
                return False
            del self._awaited[awaited.key]
            if held is not None:
                self._claimed[awaited.key] = held
            elif build:
                self._given_up.add(awaited.key)
        awaited.then()
        return True

    def _look_at(self, awaited: _Awaited) -> None:
        """Look at another machine's claim; take it over if nobody renews it."""
        place, name = self._remote.open(), self._name(awaited.key)
        try:
            seen = small(place, name, self._spool)
        except FileNotFoundError:  # sent, or given up: look for the graph again
            self._remote.forget(awaited.key)
            self._resolve(awaited, None, build=False)
            return
        except Exception:  # whatever a library raises: it is looked at again
            self._remote.counts["failed"] += 1
            return
        awaited.heard = now = time.monotonic()
        awaited.looks_at = now + self._pace(now - awaited.since)
        if seen == awaited.ours.text():  # created, and the answer was lost
            self._won(awaited)
        elif seen != awaited.seen:
            awaited.seen, awaited.changed = seen, now
        elif now - awaited.changed >= self._stale_s:
            with suppress(Exception):  # another one was quicker
                place.remove(name)
            self._remote.counts["taken over"] += 1
            awaited.answered = False
            self._ask(awaited)

    def _pace(self, waited: float) -> float:
        """Seconds until the next look: a tenth of the time that it took so far, within bounds."""
        return min(max(self._poll_s, waited / 10), self._beat_s)

    def _renew(self, key: str, held: _Held) -> None:
        with suppress(Exception):  # whatever a library raises: it is tried again
            place, name = self._remote.open(), self._name(key)
            if small(place, name, self._spool) != held.text():
                with self._remote_news:  # taken over: this machine was away for long
                    self._claimed.pop(key, None)
                return
            held.beats += 1
            place.write(name, held.text())

    def _remove(self, key: str, held: _Held) -> None:
        with suppress(Exception):  # whatever a library raises: it will be taken over
            place, name = self._remote.open(), self._name(key)
            if small(place, name, self._spool) == held.text():
                place.remove(name)

    # --- the thread that renews, and looks --------------------------------------------------------

    def _mind(self) -> None:
        """Have it run (under the lock)."""
        if self._minder is None:
            self._minder = threading.Thread(
                target=self._keep, name="warmgraph-remote-claims", daemon=True
            )
            self._minder.start()

    def _keep(self) -> None:
        beaten = time.monotonic()
        while not self._ended:
            with self._remote_news:
                while not (self._claimed or self._awaited or self._ended):
                    self._remote_news.wait()
                self._remote_news.wait(self._poll_s)
                waiting, held = list(self._awaited.values()), dict(self._claimed)
            now = time.monotonic()
            for awaited in waiting:
                self._go_on(awaited, now)
            if now - beaten >= self._beat_s:
                beaten = now
                for key, claim in held.items():
                    self._remote.crew.put(partial(self._renew, key, claim))

    def _go_on(self, awaited: _Awaited, now: float) -> None:
        waited = now - awaited.since
        unheard = awaited.answered and now - awaited.heard >= 2 * self._stale_s
        if unheard or waited >= self._limit_s():
            self._resolve(awaited, None)
        elif awaited.answered:
            if now < awaited.looks_at or self._remote.is_resting:
                return
            awaited.looks_at = now + self._beat_s  # unless it answers before
            self._remote.crew.put(partial(self._look_at, awaited))
        elif not self._remote.writes:
            self._resolve(awaited, None)
        elif waited >= self._remote.patience_s:
            self._remote.rest_late()
            self._resolve(awaited, None)
