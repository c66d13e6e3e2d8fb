"""The first result of a graph at no place of any model, compared with plain maths."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..kinds.tolerance import difference, tells_nothing
from ..reasons import Reason, of

logger = logging.getLogger(__name__)

#: A graph's own: takes a list, empties it, and gives a tuple.
Call = Callable[[list[Any]], Any]


class Loaded(Protocol):
    """A loaded graph."""

    @property
    def call(self) -> Call: ...


class Offered(Protocol):
    """A graph of the process, loaded or not."""

    key: str

    @property
    def loaded(self) -> Loaded | None: ...

    def drop(self, reason: Reason) -> None:
        """Never use it again."""


class SelfCheck:
    """Which calls were compared."""

    def __init__(self) -> None:
        """None is compared yet."""
        self._good: set[Call] = set()

    def __contains__(self, call: Call) -> bool:
        """Tell whether a call's result was good."""
        return call in self._good

    def __len__(self) -> int:
        return len(self._good)

    def problem(
        self,
        graph: Offered,
        call: Call,
        found: torch.Tensor,
        exact: torch.Tensor,
        inputs: list[torch.Tensor],
        *,
        what: str,
        weights: str,
    ) -> Reason | None:
        """Say how far a call's result is from plain maths if that is too far; the graph is dropped
        then.

        Args:
            found, exact: parts of the results, enough to compare.
            inputs: of the same parts.
            what: the graph computes, for the log.
            weights: the sort of its weights.
        """
        if tells_nothing([exact]):
            return None
        compared = difference([found], [exact], inputs)
        if compared.is_good:
            self._good.add(call)
            return None
        why = of("differs", error=f"{compared.error:.1e}", weights=weights)
        logger.warning("Warmgraph's %s is not used: it %s", what, why)
        graph.drop(why)
        return why


def ends(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return so many of the first dimension at either end; all where there are fewer."""
    return tensor if len(tensor) <= 2 * count else torch.cat((tensor[:count], tensor[-count:]))
