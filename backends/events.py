"""What the parts of one engine tell one another; who publishes does not know who listens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum

logger = logging.getLogger(__name__)


class Event(Enum):
    """What happened; the value says so in words."""

    GRAPH_CHANGED = "a graph changed its state"
    BUILDS_CHANGED = "the progress of the builds changed"
    LEARNED = "a worker learned of a model that no family describes"
    RUN_ENDED = "a run ended"
    CLEARED = "a user cleared the store, or gave memory back"


class Events:
    """Listeners by event.

    A listener runs in the thread that publishes, which holds no lock then. What it raises is logged
    and keeps nobody else from listening: no step, build or prompt hangs on being told of.
    """

    def __init__(self) -> None:
        self._listeners: dict[Event, list[Callable[[], None]]] = {event: [] for event in Event}

    def listen(self, listener: Callable[[], None], *events: Event) -> None:
        """Have a listener called after each of these events, after those that came before it."""
        for event in events:
            self._listeners[event].append(listener)

    def publish(self, event: Event) -> None:
        """Tell all who listen."""
        for listener in list(self._listeners[event]):
            try:
                listener()
            except Exception:
                logger.exception("A listener failed after %s", event.value)
