"""Graphs at no place of any model, which compute what other graphs' layers do. The first result of
each is compared with plain maths.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch

from ..device.gpu import index, is_capturing
from ..kinds.tolerance import Outcome, judge
from ..reasons import Reason, of

logger = logging.getLogger(__name__)

#: A graph's own: takes a list, empties it, and gives a tuple.
Call = Callable[[list[Any]], Any]
#: Gives parts of a result that are enough to compare, those of plain maths, and the inputs of both.
Parts = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]]


class Offered(Protocol):
    """A graph of the process (`graphs.compiled_graph`), loaded or not."""

    key: str

    @property
    def loaded(self) -> Any: ...

    def drop(self, reason: Reason) -> None: ...


class Auxiliary(NamedTuple):
    """A graph that may be called now; `good` are the calls that were compared."""

    graph: Offered
    call: Call
    good: set[Call]

    def run(
        self, inputs: list[torch.Tensor], parts: Parts, *, what: str, weights: str
    ) -> torch.Tensor | None:
        """Return its result; None if that is too far from plain maths: the graph is dropped then.

        Args:
            what: it computes, for the log.
            weights: the sort of its weights.
        """
        result: torch.Tensor
        (result,) = self.call(list(inputs))
        if self.call in self.good:
            return result
        found, exact, given = parts(result)
        judged = judge([found], [exact], given)
        if judged.outcome is Outcome.BAD:
            why = of("differs", error=f"{judged.error:.1e}", weights=weights)
            logger.warning("Warmgraph's %s is not used: it %s", what, why)
            self.graph.drop(why)
            return None
        if judged.is_good:
            self.good.add(self.call)
        return result


class AuxiliaryGraphs:
    """By what they compute and where; for any thread."""

    def __init__(self) -> None:
        """None is offered yet."""
        self._offered: dict[tuple[Hashable, str, int], Offered] = {}
        self._good: set[Call] = set()

    def offer(self, form: Hashable, device: str, graph: Offered, card: int = 0) -> None:
        """Have a graph compute a form, once it is loaded.

        Args:
            device: the type.
            card: which of these devices it is, by its number.
        """
        self._offered[form, device, card] = graph

    def of(
        self, form: Hashable, device: torch.device, *, is_ready: bool = True
    ) -> Auxiliary | None:
        """Return the graph of a form; None without one, or if it cannot be called at this moment:
        while a call is captured nothing may be waited for, and what is made would be that call's.

        Args:
            is_ready: whether its call would make nothing that is kept.
        """
        graph = self._offered.get((form, device.type, index(device)))
        loaded = None if graph is None else graph.loaded
        if graph is None or loaded is None:
            return None
        if is_capturing(device) and not (is_ready and loaded.call in self._good):
            return None
        return Auxiliary(graph, loaded.call, self._good)


def ends(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return so many of the first dimension at either end; all where there are fewer."""
    return tensor if len(tensor) <= 2 * count else torch.cat((tensor[:count], tensor[-count:]))
