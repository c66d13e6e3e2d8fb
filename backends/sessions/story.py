"""The log of a prompt at INFO: what was attached, when its graphs were ready, how it ran.

A line that is new for its session is logged at INFO, else at DEBUG: a VAE runs once a frame, and an
upscaler samples once a tile.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence

from ..graphs.compiled_graph import CompiledGraph, State
from ..reasons import NOTHING, Reason
from ..runtime.session import Session

logger = logging.getLogger(__name__)

_REASON_CHARACTERS = 120


class Story:
    """Logs the sessions of one server process."""

    def __init__(self) -> None:
        """Nothing is logged yet."""
        #: What was last said of a session's runs.
        self._told: weakref.WeakKeyDictionary[Session, str] = weakref.WeakKeyDictionary()
        #: Steps that were replayed, and those that were not, by reason, until then.
        self._counted: weakref.WeakKeyDictionary[Session, Counter[Reason]] = (
            weakref.WeakKeyDictionary()
        )

    def attached(self, session: Session, graphs: Sequence[CompiledGraph]) -> None:
        """A node attached a session, and its graphs were asked for."""
        if not graphs:
            why = session.notes[0] if session.notes else "nothing of it is compiled"
            logger.info("Warmgraph: %s is attached: %s", session.name, _short(why))
            return
        ready = sum(graph.state is State.READY for graph in graphs)
        pending = sum(graph.is_pending for graph in graphs)
        coming = f", {pending} are looked for or compiled" if pending else ""
        logger.info(
            "Warmgraph: %s has %d regions of %d kinds; %d of %d compiled graphs are ready%s",
            session.name,
            len(session.scope.plan.places),
            sum(bool(kind.places) for kind in session.scope.kinds),
            ready,
            len(graphs),
            coming,
        )

    def ran(self, session: Session) -> None:
        """A run ended."""
        line = self._line(session)
        level = logging.DEBUG if self._told.get(session) == line else logging.INFO
        self._told[session] = line
        logger.log(level, "Warmgraph: %s ran %s", session.name, line)

    def _line(self, session: Session) -> str:
        now = session.parts()
        eager, compiled = now.eager, now.compiled + now.ready
        parts = [f"with {now.compiled} of {compiled + len(eager)} regions compiled"]
        parts += self._captured(session)
        if eager:
            reasons = Counter(reason for _, reason in eager).most_common()
            more = f" (and {len(reasons) - 1} more reasons)" if len(reasons) > 1 else ""
            parts.append(f"{len(eager)} eager: {_short(reasons[0][0])}{more}")
        return "; ".join(parts)

    def _captured(self, session: Session) -> list[str]:
        """Whether steps were replayed since the last call, or why not."""
        replays = [each.replays for each in session.scopes if each.replays is not None]
        now = sum((Counter(dict(one.reasons)) for one in replays), Counter())
        now[NOTHING] = sum(one.replayed for one in replays)
        before = self._counted.get(session, Counter())
        self._counted[session] = now
        new = now - before
        replayed = new.pop(NOTHING, 0)
        parts = ["steps are replayed from CUDA graphs"] if replayed else []
        if new:
            reason, _ = new.most_common(1)[0]
            parts.append(f"{'some' if replayed else 'steps'} are not captured: {_short(reason)}")
        return parts


def _short(reason: str) -> str:
    return reason if len(reason) <= _REASON_CHARACTERS else f"{reason[:_REASON_CHARACTERS]}..."
