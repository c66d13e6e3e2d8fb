"""What became of a session's steps in its last run, and so what may be called compiled."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Container, Sequence
from typing import NamedTuple

from ..plans.plan import Plan
from ..reasons import Reason


class LastRun(NamedTuple):
    """A run that has ended.

    Attributes:
        ran: the places that graphs have served.
        placed: the places whose graphs the model could have called, except those that were compared
            with what it called instead.
        why: why graphs served none, where that is known.
    """

    ran: frozenset[str]
    placed: frozenset[str]
    why: Reason | None


class PartCounts(NamedTuple):
    """How the parts of a model stand.

    Attributes:
        compiled: how many ran by graphs in the last run.
        ready: how many have graphs that no run could use yet.
        idle: how many have graphs and were not called in the last run.
        eager: (place, reason) of those that ran as without us, or will.
    """

    compiled: int
    ready: int
    idle: int
    eager: list[tuple[str, Reason]]


class Coverage(NamedTuple):
    """How much of one root module is compiled; `parts` says it in numbers.

    Attributes:
        places: of all parts that can have graphs.
        eager: (place, reason) of everything that runs as without us now.
        last: what its last run did; None before the first.
    """

    places: Sequence[str]
    eager: Sequence[tuple[str, Reason]]
    last: LastRun | None


class Steps:
    """Counts the steps of a run, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: What the last run did; None before the first has ended.
        self.last: LastRun | None = None
        #: Whether there was any step in the last run.
        self.took_part = False
        self._begin()

    def _begin(self) -> None:
        self._served = 0
        self._left: Counter[Reason] = Counter()
        self._beside: Reason | None = None

    def begin_run(self) -> None:
        """A run starts."""
        with self._lock:
            self._begin()

    def serve(self, beside: Reason | None) -> None:
        """A step runs through graphs; `beside`: another node's part in it, if any."""
        with self._lock:
            self._served += 1
            self._beside = beside or self._beside

    def leave(self, reason: Reason) -> None:
        """A step runs as without us."""
        with self._lock:
            self._left[reason] += 1

    @property
    def came(self) -> bool:
        """Whether there was any step in this run."""
        return bool(self._served or self._left)

    def end_run(self, ran: frozenset[str], placed: frozenset[str]) -> None:
        """The run has ended."""
        with self._lock:
            self.took_part, why = self.came, self._beside
            if not self._served and self._left:
                why = self._left.most_common(1)[0][0]
            self.last = LastRun(ran, placed, None if ran else why)


def parts_of(plan: Plan, told: Container[str], idle: Container[str]) -> list[str]:
    """Return the names of a plan's parts. A block that is called in several ways is one part,
    except that each way with something to report is its own; the block is idle if all of its ways
    are.

    Args:
        told: names of places that ran, or did not for a reason.
        idle: names of those that could have been called.
    """
    found: list[str] = []
    for dispatch in plan.dispatches:
        names = [place.name for place in dispatch.regions]
        if dispatch.apart:
            ways = [name for name in names if name in told]
            names = ways or sorted(names, key=lambda name: name in idle)[:1]
        found += names
    return found


def together(found: Sequence[Coverage]) -> Coverage:
    """Return how a model stands that ran as several copies: a part is compiled if it is in all of
    them.
    """
    eager = {name: why for each in reversed(found) for name, why in each.eager}
    runs = [each.last for each in found if each.last is not None]
    last = None
    if runs:
        ran = frozenset.intersection(*(run.ran for run in runs))
        placed = frozenset.intersection(*(run.placed for run in runs))
        last = LastRun(ran, placed, next((run.why for run in runs if run.why is not None), None))
    return Coverage(found[0].places, list(eager.items()), last)


def parts(
    places: Sequence[str], eager: Sequence[tuple[str, Reason]], last: LastRun | None
) -> PartCounts:
    """Say how parts stand; see `Coverage`."""
    found, named = list(eager), {name for name, _ in eager}
    good = [name for name in places if name not in named]
    if last is None:
        return PartCounts(0, len(good), 0, found)
    if last.why is not None:
        return PartCounts(0, 0, 0, [*found, *((name, last.why) for name in good)])
    compiled = sum(name in last.ran for name in good)
    idle = sum(name in last.placed and name not in last.ran for name in good)
    return PartCounts(compiled, len(good) - compiled - idle, idle, found)
