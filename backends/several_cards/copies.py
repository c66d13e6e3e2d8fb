"""Copies of a session's root module, each with weights of its own: the host makes one for each
further card, and one that is to run on another.

What serves a copy is kept on the copy and freed with it; a session only lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

from ..live import Live
from .order import CardOrder

_NAME = "_warmgraph_cards"


class Served(Protocol):
    """A copy, by what serves it.

    Attributes:
        scope: what it runs through.
        counts: what became of its steps.
    """

    scope: Any
    counts: Any


T = TypeVar("T", bound=Served)


class _Kept(WeakKeyDictionary["Cards[Any]", Any]):
    """What is kept on a copy, by session; a copy of the copy starts without."""

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()


class Cards(Generic[T]):
    """The copies of one session's root module."""

    def __init__(self) -> None:
        self._cards: Live[T] = Live()
        #: The order in which their steps are queued.
        self.order = CardOrder()

    def __iter__(self) -> Iterator[T]:
        return iter(self._cards.values())

    def begin_run(self) -> None:
        """A run starts; which copies take part is not known yet."""
        for card in self:
            card.counts.begin_run()

    def in_order(self, card: T | None, *, is_first: bool) -> AbstractContextManager[None]:
        """Queue a call among those of other cards, where there are any.

        Args:
            card: of the copy that is called; None is no copy.
            is_first: whether it is the root module itself.
        """
        if card is not None:
            return self.order.other(id(card))
        return self.order.first() if is_first and self._cards.values() else nullcontext()

    def take(self, root: torch.nn.Module, holder: Any, make: Callable[[], T]) -> T:
        """Return what serves a copy; make it if needed.

        Args:
            root: the copy.
            holder: the module on which the host notes where the copy's weights are.
        """
        kept = vars(holder).setdefault(_NAME, _Kept())
        card: T | None = kept.get(self)
        if card is None or card.scope.root is not root:
            card = kept[self] = make()
            self._cards.add(id(card), card)
        return card

    def of(self, scope: Any) -> T | None:
        """Return what serves the copy of this scope; None if it is of no copy."""
        return next((card for card in self if card.scope is scope), None)

    def of_root(self, root: Any) -> T | None:
        """Return what serves a copy; None of any other module."""
        return next((card for card in self if card.scope.root is root), None)
