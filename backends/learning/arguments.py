"""A root module's call as data, and the sizes in it that may vary: the batch, a side of the latent
or the length of a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import LearnError
from ..plans.plan import FORWARD
from .calls import noted
from .values import OPTIONS, Template, put_together, take_apart

BATCH, SPACE, TEXT = "batch", "space", "text"

#: Where a size stands: a leaf, and the axis of a tensor (-1 for a whole number).
Spot = tuple[int, int]


def write_down(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a root module's call as JSON-plain data: "call" (template of `[args, kwargs]`) and
    "leaves" (`calls.noted`). Only plain options are kept.

    Args:
        args, kwargs: of the call.
        names: of positional arguments; options may be among them.

    Raises:
        LearnError: an argument cannot be described.
    """
    leaves: list[Any] = []

    def part(name: str, value: Any) -> Template:
        return _options(value, leaves) if name == OPTIONS else take_apart(value, leaves, name)

    unnamed = [""] * (len(args) - len(names))
    positional = [part(*each) for each in zip([*names, *unnamed], args, strict=False)]
    named = [[name, part(name, value)] for name, value in kwargs.items()]
    call = ["list", [["list", positional], ["dict", named]]]
    return {"call": call, "leaves": list(map(noted, leaves))}


def _options(options: Any, leaves: list[Any]) -> Template:
    """A step's options. A whole number in them is not a size of the call: it stays as it is."""
    kept = []
    for name, value in (options or {}).items():
        before = len(leaves)
        try:
            kept.append([name, take_apart(value, leaves, numbers=False)])
        except LearnError:  # such as a node's functions
            del leaves[before:]
    return ["dict", kept]


class Growth(NamedTuple):
    """How another size is made from one: `size * times // over + plus`."""

    times: int = 1
    plus: int = 0
    over: int = 1


#: Other sizes that are tried: far beyond what a model may round a length up to; then, for models
#: that have a largest one, near it and below it. Sides are multiples of a patch.
_GROWTHS = {
    BATCH: (Growth(times=3),),
    SPACE: (Growth(times=8), Growth(times=2), Growth(over=2)),
    TEXT: (Growth(plus=1024), Growth(plus=64), Growth(over=2)),
}


class Variable(NamedTuple):
    """A size of a call that may vary.

    Attributes:
        name: of its kind, and a number.
        spots: its positions.
        growth: how the other size is made.
    """

    name: str
    spots: tuple[Spot, ...]
    growth: Growth

    @property
    def kind(self) -> str:
        """`BATCH`, `SPACE` or `TEXT`."""
        return self.name.partition(":")[0]

    def varies_with(self, other: Variable) -> bool:
        """Tell whether it is no other size than one that may vary: that one itself, or the channels
        of what has the latent's sides.
        """
        spot = self.spots[0]
        sides = {leaf for leaf, _ in other.spots} if other.kind == SPACE else set()
        return spot in other.spots or (self.kind == TEXT and spot[0] in sides)

    def smallest(self) -> Variable:
        """Return it with the growth that a model most likely accepts."""
        return self._replace(growth=_GROWTHS[self.kind][-1])


class WatchedCall:
    """A watched call, to be made again at other sizes or in another dtype."""

    def __init__(self, facts: Mapping[str, Any], dtype: str) -> None:
        """Set up.

        Args:
            facts: as `write_down` gives them.
            dtype: that the model computes in.
        """
        self._call, self._leaves, self.dtype = facts["call"], facts["leaves"], dtype
        #: Which of the root's methods was called.
        self.method: str = facts.get("method", FORWARD)
        self._tensors = [(i, each[1]) for i, each in enumerate(self._leaves) if _is_tensor(each)]

    def variables(self) -> Iterator[tuple[Variable, ...]]:
        """Yield for each size the ways in which it may vary in the call, the widest first; they are
        tried until the model accepts one.
        """
        (_, first), *_ = self._tensors or [(0, [])]
        if not first:
            return
        rows = [(i, 0) for i, shape in self._tensors if shape and shape[0] == first[0]]
        yield _ways(BATCH, tuple(rows))
        sided = [i for i, shape in self._tensors if len(shape) == len(first)]
        for axis in range(2, len(first)):
            alike = tuple((i, axis) for i in sided if self._shape(i)[axis] == first[axis])
            # a length of sound may be as large as a text is wide
            same = tuple((i, axis) for i in sided if self._shape(i)[1:] == first[1:])
            yield _ways(f"{SPACE}:{axis}", alike, same, alike[:1])
        for i, shape in self._tensors[1:]:
            if len(shape) > 3 and i not in sided:
                for axis in range(2, len(shape)):
                    yield _ways(f"{SPACE}:{axis}:{i}", ((i, axis),))
        yield from self._lengths([i for i, s in self._tensors[1:] if len(s) == 3])

    def _lengths(self, texts: Sequence[int]) -> Iterator[tuple[Variable, ...]]:
        """Ways for a length of tokens: with everything else of that length, then with other texts
        of that length.
        """
        for number, text in enumerate(texts):
            length = self._shape(text)[1]
            own = [(text, 1)]
            long = [*own, *((i, 1) for i in texts if i != text and self._shape(i)[1] == length)]
            counts = [(i, -1) for i, n in enumerate(self._leaves) if n == length]
            masks = [(i, 1) for i, s in self._tensors if len(s) == 2 and s[1] == length]
            whole = [(i, 1) for i, _ in masks if not self._leaves[i][0].startswith("float")]
            together = [
                (*several, *others)
                for several in (own, long)
                for others in ((*counts, *masks), (*counts, *whole), counts, ())
            ]
            yield _ways(f"{TEXT}:{number}", *together)

    def _shape(self, leaf: int) -> list[int]:
        shape: list[int] = self._leaves[leaf][1]
        return shape

    def must_vary(self, variable: Variable) -> bool:
        """Tell whether blocks that were learned at only one such size are of little use. A
        dimension of 1 may be fixed in the model, and any dimension of an input beside the latent
        may be a number of channels: then the host makes calls of other sizes.
        """
        leaf, axis = variable.spots[0]
        is_latent = leaf == self._tensors[0][0]
        return variable.kind != SPACE or (is_latent and self._shape(leaf)[axis] > 1)

    def changed(self, variables: Sequence[Variable]) -> dict[Spot, int]:
        """Return other sizes for these."""
        found = {}
        for variable in variables:
            times, plus, over = variable.growth
            for leaf, axis in variable.spots:
                size = self._leaves[leaf] if axis < 0 else self._shape(leaf)[axis]
                found[leaf, axis] = size * times // over + plus
        return found

    def make(self, sizes: Mapping[Spot, int], dtype: str) -> tuple[list[Any], dict[str, Any]]:
        """Make the arguments, within a mode of fakes.

        Args:
            sizes: that are changed.
            dtype: that the model computes in.
        """
        made: list[Any] = []
        for i, leaf in enumerate(self._leaves):
            if not _is_tensor(leaf):
                made.append(sizes.get((i, -1), leaf))
                continue
            kind, shape = leaf
            if kind == self.dtype and len(shape) > 1:  # a timestep is float32 in any model
                kind = dtype
            shape = [sizes.get((i, axis), size) for axis, size in enumerate(shape)]
            made.append(torch.empty(shape, dtype=getattr(torch, kind)))
        args, kwargs = put_together(self._call, made)
        return args, kwargs


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, list)


def _ways(name: str, *spots: tuple[Spot, ...]) -> tuple[Variable, ...]:
    growths = _GROWTHS[name.partition(":")[0]]
    return tuple(Variable(name, each, how) for how in growths for each in dict.fromkeys(spots))
