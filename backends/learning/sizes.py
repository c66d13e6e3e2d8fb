"""What varies with what: from one call at several sizes of its root's arguments to sizes by name.

A size that is the sum of others is split, one that is their product is unflattened, so that each
size is an input's own. Names, ranges and examples follow from what a size varies with, never from
the watched call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

from ..contract import Symbol
from ..plans.symbols import SYMBOLS
from .arguments import BATCH, SPACE, TEXT, Variable

#: The largest constant that may be added to a size, such as register tokens.
_MOST_CONSTANT = 4096
#: Sizes that written families have none of: rows of images times something, one side, any other.
_OTHERS = (
    Symbol("rows", 1, 2**17, 520),
    Symbol("side", 1, 2**12, 16),
    Symbol("free", 1, 2**17, 264),
)
_KNOWN = {**SYMBOLS, **{symbol.name: symbol for symbol in _OTHERS}}
_LENGTHS = ("img", "txt", "tokens")

#: A size in each run: the first as it was watched, the others with some variables changed.
Vector = tuple[int, ...]
SUM, PRODUCT = "sum", "product"


class ComposedSize(NamedTuple):
    """A composed size: `SUM` or `PRODUCT` of names and constants."""

    how: str
    of: list[Any]


class Sizes:
    """Names of the sizes of one call."""

    def __init__(self, runs: Sequence[Sequence[Variable]]) -> None:
        """Set up.

        Args:
            runs: the variables that were changed in each run but the first.
        """
        self._runs = runs
        sides = {each.name for run in runs for each in run if each.kind == SPACE}
        self._has_sides = len(sides) > 1
        self._names: dict[Vector, str] = {}
        self._counts: Counter[str] = Counter()
        self._varies: dict[str, frozenset[str]] = {}
        #: By name, where a size is the sum or product of others.
        self.parts: dict[str, ComposedSize] = {}

    def named(self, vector: Vector) -> int | str:
        """Return a size: a constant one as it is, otherwise its name."""
        if len(set(vector)) == 1:
            return vector[0]
        if vector not in self._names:
            changed = zip(vector[1:], self._runs, strict=True)
            alone = (run[0].name for v, run in changed if v != vector[0] and len(run) == 1)
            varies = frozenset(alone)
            word = self._word(varies)
            self._counts[word] += 1
            number = self._counts[word]
            name = word if number == 1 else f"{word}{number}"
            self._names[vector], self._varies[name] = name, varies
        return self._names[vector]

    def _word(self, varies: frozenset[str]) -> str:
        kinds = {name.partition(":")[0] for name in varies}
        if BATCH in kinds:
            return "batch" if len(varies) == 1 else "rows"
        if kinds == {SPACE, TEXT}:
            return "tokens"
        if TEXT in kinds:
            return "txt"
        if not varies:
            return "free"
        return "side" if self._has_sides and len(varies) == 1 else "img"

    def only_length(self) -> str | None:
        """Return the name of the only length of tokens, None if there are several: a block with one
        length does not depend on whose tokens they are.
        """
        found = [name for name in self._names.values() if name.rstrip("0123456789") in _LENGTHS]
        return found[0] if len(found) == 1 else None

    def rename(self, name: str, other: str) -> None:
        """Call a size by another name."""
        self._names = {v: other if n == name else n for v, n in self._names.items()}
        self._varies[other] = self._varies.pop(name)

    def find_parts(self) -> None:
        """Find composed sizes; those that vary with least are not composed."""
        vectors = {name: vector for vector, name in self._names.items()}
        names = sorted(vectors, key=lambda name: len(self._varies[name]))
        for name in names:
            others = [
                each
                for each in names
                if each not in (name, *self.parts) and self._varies[each] <= self._varies[name]
            ]
            found = next(_made_of(vectors[name], {each: vectors[each] for each in others}), None)
            if found is not None:
                self.parts[name] = found

    def symbol(self, name: str) -> Symbol:
        """Return a size with its range."""
        return replace(_KNOWN[name.rstrip("0123456789")], name=name)


def _made_of(vector: Vector, others: Mapping[str, Vector]) -> Iterator[ComposedSize]:
    """Yield the possible compositions of a size."""
    for a, b in combinations(sorted(others), 2):
        pairs = list(zip(others[a], others[b], strict=True))
        if vector == tuple(map(sum, pairs)):
            yield ComposedSize(SUM, [a, b])
        elif vector == tuple(map(prod, pairs)):
            yield ComposedSize(PRODUCT, [a, b])
    for name in sorted(others):
        steps = {x - y for x, y in zip(vector, others[name], strict=True)}
        if len(steps) == 1 and 0 < (step := min(steps)) <= _MOST_CONSTANT:
            yield ComposedSize(SUM, [step, name])
    for several in combinations(sorted(others), 3):
        if vector == tuple(map(prod, zip(*(others[name] for name in several), strict=True))):
            yield ComposedSize(PRODUCT, list(several))
