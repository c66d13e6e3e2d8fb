"""Objects by name for as long as somebody else keeps them, to be listed from any thread.

The rule for what several threads look at: whoever lists a dict, set or list that another thread
changes lists a copy, made by `copy()`, `dict(...)`, `list(...)` over keys or values: one step of
the interpreter, in which no other thread runs. The weak containers of the standard library have no
such copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Live(Generic[T]):
    """Holds what it lists by weak references only."""

    def __init__(self) -> None:
        self._references: dict[Hashable, weakref.ref[T]] = {}

    def add(self, name: Hashable, thing: T) -> None:
        """List a thing under a name until nobody keeps it any more."""
        references = self._references

        def gone(reference: weakref.ref[T]) -> None:
            if references.get(name) is reference:  # else the name is another's by now
                references.pop(name, None)

        references[name] = weakref.ref(thing, gone)

    def items(self) -> list[tuple[Hashable, T]]:
        """Return (name, thing) of all that are kept, in the order they came."""
        found = [(name, reference()) for name, reference in self._references.copy().items()]
        return [(name, thing) for name, thing in found if thing is not None]

    def values(self) -> list[T]:
        """Return all that are kept, in the order they came."""
        return [thing for _, thing in self.items()]
