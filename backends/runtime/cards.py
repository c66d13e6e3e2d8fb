"""Copies of a session's root module, each with weights of its own: the host makes one for each
further card, and one that is to run on another.

What serves a copy is kept on the copy and freed with it; a session only lists them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .abreast import Abreast
from .last_run import Steps
from .live import Live
from .pace import Pace
from .scope import Scope

_NAME = "_warmgraph_cards"


class Card:
    """What serves one copy.

    Attributes:
        scope: what it runs through.
        pace: how long its steps take.
        counts: what became of them in the last run, and in this one.
    """

    def __init__(self, scope: Scope, pace: Pace) -> None:
        self.scope, self.pace, self.counts = scope, pace, Steps()

    @property
    def device(self) -> torch.device | None:
        """Where it was described for; None before."""
        return self.scope.device


class _Kept(WeakKeyDictionary["Cards", Card]):
    """What is kept on a copy, by session; a copy of the copy starts without."""

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()


class Cards:
    """The copies of one session's root module."""

    def __init__(self) -> None:
        self._cards: Live[Card] = Live()
        #: The order in which their steps are queued.
        self.abreast = Abreast()

    def __iter__(self) -> Any:
        return iter(self._cards.values())

    def begin_run(self) -> None:
        """A run starts; which copies take part is not known yet."""
        for card in self:
            card.counts.begin_run()

    def in_order(self, card: Card | None, *, is_first: bool) -> AbstractContextManager[None]:
        """Queue a call among those of other cards, where there are any.

        Args:
            card: of the copy that is called; None is no copy.
            is_first: whether it is the root module itself.
        """
        if card is not None:
            return self.abreast.other(id(card))
        return self.abreast.first() if is_first and self._cards.values() else nullcontext()

    def take(self, first: Scope, pace: Pace, root: torch.nn.Module, holder: Any) -> Card:
        """Return what serves a copy; make it if needed.

        Args:
            first: of the root module itself.
            pace: of its steps.
            root: the copy.
            holder: the module on which the host notes where the copy's weights are.
        """
        kept = vars(holder).setdefault(_NAME, _Kept())
        card: Card | None = kept.get(self)
        if card is None or card.scope.root is not root:
            card = kept[self] = Card(first.copy(root, holder), pace.fresh())
            self._cards.add(id(card), card)
        return card

    def of(self, scope: Scope) -> Card | None:
        """Return the `Card` that a scope belongs to; None if it serves no copy."""
        return next((card for card in self if card.scope is scope), None)

    def scope_of(self, root: Any) -> Scope | None:
        """Return what a copy runs through; None of any other module."""
        return next((card.scope for card in self if card.scope.root is root), None)
