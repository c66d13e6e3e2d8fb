"""Claims in a remote store: of the machines that share one, one builds a graph.

    URL/FINGERPRINT/KEY.claim        a token of who builds it, and since when

They come after the claims of the local store, which is shared within a machine. Each look at one
looks for the graph, too, so who is about to build has what another machine built meanwhile. As
those of the local store, claims are trusted for nothing but waiting: whoever waits too long, or
does not reach the place, builds, and one that is five minutes old counts for nothing.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..building.claims import Claims
from ..storing.manifest import is_key
from ..storing.signing import Signer
from .place import private_folder
from .remote import Remote

logger = logging.getLogger(__name__)

AGE_S = 300.0
#: Between two looks: a tenth of the time that it took so far, within these.
LOOK_S, MOST_LOOK_S = 2.0, 15.0
_MOST_BYTES = 200


@dataclass(eq=False)
class _Asked:
    """A graph that is to be built: of which target, and since when it is; when to ask again, by the
    monotonic clock; whether another machine's claim was seen, whether there is nothing to wait for,
    and whether a claim is ours.
    """

    target: str
    since: float
    again: float = 0.0
    is_claimed: bool = False
    is_over: bool = False
    is_ours: bool = False


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
        look_s: float = LOOK_S,
        age_s: float = AGE_S,
    ) -> None:
        """Set up; nothing is read or made.

        Args:
            folder, signer, patience_s: see `Claims`.
            remote: where claims of machines lie.
            spool: in the private folder, for what is read.
            look_s: seconds between two looks, at least.
            age_s: seconds after which a claim counts for nothing.
        """
        super().__init__(folder, signer, patience_s=patience_s)
        self._remote, self._spool = remote, spool
        self._look_s, self._age_s = look_s, age_s
        self._token = secrets.token_hex(8)
        self._asked: dict[str, _Asked] = {}  # guarded by the lock
        self._can_claim = True

    def take(self, key: str, target: str = "") -> bool:
        """See `Claims`; False also while the remote store is asked."""
        if not super().take(key, target):
            return False
        with self._lock:
            now = time.monotonic()
            asked = self._asked.setdefault(key, _Asked(target, now))
            is_late = now - asked.since >= self._patience_s()
            if asked.is_over or is_late or self._closed or self._remote.is_resting:
                return True
            if asked.again > now:
                return False
            asked.again = math.inf
        self._remote.ask(partial(self._claim, key, asked), partial(self._go_on, asked))
        return False

    def release(self, key: str) -> None:
        """See `Claims`; the remote claim goes once the graph is sent."""
        super().release(key)
        with self._lock:
            asked = self._asked.pop(key, None)
        if asked is not None and asked.is_ours:
            self._remote.after_push(key, partial(self._remove, key))

    def close(self) -> None:
        """See `Claims`."""
        super().close()
        self._remote.close()

    def _go_on(self, asked: _Asked, may_build: bool | None) -> None:
        asked.is_over = may_build is not False  # who does not reach the place builds
        now = time.monotonic()
        asked.again = now + min(max(self._look_s, (now - asked.since) / 10), MOST_LOOK_S)

    # --- in the remote's pool ---------------------------------------------------------------------

    def _claim(self, key: str, asked: _Asked) -> bool:
        may_build = self._may_build(key, asked)
        with self._lock:
            is_wanted = self._asked.get(key) is asked
        if asked.is_ours and not is_wanted:  # released meanwhile
            self._remove(key)
        return may_build

    def _may_build(self, key: str, asked: _Asked) -> bool:
        """Claim a graph, and have it if it is there; False while another machine builds it."""
        if not (self._remote.writes and self._can_claim):
            self._remote.take(key, asked.target)
            return True
        if asked.is_claimed and self._remote.take(key, asked.target):
            return True
        if asked.is_claimed and (holder := self._holder(key)) is not None:
            if not self._is_void(holder):
                return False
            if not holder.startswith(self._token):
                self._remote.counts["taken over"] += 1
                self._remote.place.write(self._name(key), self._text())
        elif not self._create(key):
            asked.is_claimed = True
            return False
        asked.is_ours = self._can_claim
        self._remote.take(key, asked.target)  # it may have come before it was claimed
        return True

    def _create(self, key: str) -> bool:
        """Make a claim that is not there, where the place can tell."""
        try:
            self._remote.place.create(self._name(key), self._text())
        except FileExistsError:
            return False
        except (NotImplementedError, TypeError, PermissionError) as error:
            self._can_claim = False
            what = type(error).__name__
            logger.info("Warmgraph: graphs are built whatever other machines build: %s", what)
        return True

    def _holder(self, key: str) -> str | None:
        """Return what a claim says; None where there is none."""
        with private_folder(self._spool) as folder, suppress(FileNotFoundError):
            self._remote.place.fetch(self._name(key), folder / "claim", _MOST_BYTES)
            return (folder / "claim").read_text("utf-8", "replace")
        return None

    def _is_void(self, claim: str) -> bool:
        """Whether a claim is old, makes no sense, or is of this server: then the answer to its
        creation was lost.
        """
        token, _, since = claim.partition(" ")
        with suppress(ValueError):
            return token == self._token or not abs(time.time() - float(since)) < self._age_s
        return True

    def _remove(self, key: str) -> None:
        with suppress(Exception):  # whatever a library raises: it grows old
            self._remote.place.remove(self._name(key))

    def _text(self) -> bytes:
        return f"{self._token} {time.time():.0f}".encode()

    def _name(self, key: str) -> str:
        assert is_key(key)
        return f"{self._signer.fingerprint}/{key}.claim"
