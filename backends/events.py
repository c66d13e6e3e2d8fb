"""Events between the parts of one engine; publishers do not know the listeners."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum

logger = logging.getLogger(__name__)


class Event(Enum):
    """What happened, in words."""

    GRAPH_CHANGED = "a graph changed its state"
    BUILDS_CHANGED = "the progress of the builds changed"
    LEARNED = "a worker learned of a model that no family describes"
    RUN_ENDED = "a run ended"
    CLEARED = "a user cleared the store, or gave memory back"


class Events:
    """Listeners by event.

    A listener runs in the publishing thread, which holds no lock then. Its exceptions are logged
    and do not stop other listeners, nor any step, build or prompt.
    """

    def __init__(self) -> None:
        self._listeners: dict[Event, list[Callable[[], None]]] = {event: [] for event in Event}

    def listen(self, listener: Callable[[], None], *events: Event) -> None:
        """Call a listener after each of these events, after earlier listeners."""
        for event in events:
            self._listeners[event].append(listener)

    def publish(self, event: Event) -> None:
        """Call all listeners."""
        for listener in list(self._listeners[event]):
            try:
                listener()
            except Exception:
                logger.exception("A listener failed after %s", event.value)
