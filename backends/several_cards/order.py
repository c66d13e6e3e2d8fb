"""One model's steps on several cards, queued so that they run at the same time.

PyTorch puts a copy between two cards into both cards' queues: it waits for all that the source has
queued before, and all that the target queues later waits for it. A replayed step is queued whole.
So the first card, which holds the latent, queues its step once the others have their inputs, and
they pass on their results once it has.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

#: In seconds: who does not come by then comes in some other order, or not at all.
LIMIT_S = 0.02

_FIRST = object()


class CardOrder:
    """Orders the cards' parts of each evaluation of all conditionings."""

    def __init__(self) -> None:
        """Nothing is evaluated yet; at first no card waits."""
        self._changed = threading.Condition()
        self._count = 0
        self._came: set[Hashable] = set()
        self._is_queued = False
        #: Who takes part: who came the last time, by the number of conditionings.
        self._takes_part: dict[int, frozenset[Hashable]] = {}

    def begin(self, count: int) -> None:
        """An evaluation begins, after the last one's end.

        Args:
            count: of conditionings, by which the host spreads them over the cards.
        """
        with self._changed:
            self._takes_part[self._count] = frozenset(self._came)
            self._count, self._came, self._is_queued = count, set(), False

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Queue the part of the card on which the latent lies."""
        with self._changed:
            self._came.add(_FIRST)
            self._changed.wait_for(lambda: self._expected <= self._came, LIMIT_S)
        try:
            yield
        finally:
            with self._changed:
                self._is_queued = True
                self._changed.notify_all()

    @contextlib.contextmanager
    def other(self, card: Hashable) -> Iterator[None]:
        """Queue the part of another card, which has its inputs."""
        with self._changed:
            self._came.add(card)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_queued or _FIRST not in self._expected, LIMIT_S
                )

    @property
    def _expected(self) -> frozenset[Hashable]:
        return self._takes_part.get(self._count, frozenset())


def around_batch(
    order: CardOrder,
    spare: Callable[..., Any],
    executor: Any,
    model: Any,
    conditionings: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The host's CALC_COND_BATCH wrapper: one evaluation of all conditionings, on all cards.

    Args:
        spare: runs optional work (`Faults.spare`).
    """
    spare(lambda: order.begin(sum(len(each) for each in conditionings if each is not None)))
    return executor(model, conditionings, *args, **kwargs)
