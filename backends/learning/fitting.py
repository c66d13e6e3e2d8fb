"""Whether a call is made in a learned way, and what a region takes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from math import prod
from typing import Any, NamedTuple

import torch

from ..errors import LearnError
from ..host_api.options import ATTENTION, PATCHES, REPLACEMENTS
from ..kinds.layout import InputForm, form_of
from ..reasons import Reason, of
from .calls import memory
from .notes import BARE, LIVE
from .options import ABSENT
from .sizes import SUM
from .values import (
    OPTIONS,
    Template,
    attributes,
    is_same,
    kind_of,
    name_of,
    put_together,
    take_apart,
)
from .ways import INT, Way

#: Forms of inputs that are remembered.
_MOST_FORMS = 64


class Fitted(NamedTuple):
    """A call that is made in a way.

    Attributes:
        inputs: of the region.
        leaves: of the call.
        options: that its attention gets.
        form: of the inputs; None where they were cut out of the leaves.
    """

    inputs: list[Any]
    leaves: list[Any]
    options: dict[str, Any]
    form: InputForm | None


class _OtherError(Exception):
    """A call differs; the text is the argument's name."""


class Fit:
    """Compares calls with one way."""

    def __init__(self, way: Way) -> None:
        """Set up.

        Args:
            way: `ways.learn_way`.
        """
        self._way, self._leaves = way, way["leaves"]
        arguments = sorted(way["arguments"], key=lambda each: each[0] != OPTIONS)
        #: As they are taken (`plans.binding`), each sort by itself: a call takes microseconds.
        taken = [(at, each, name) for at, (name, each) in enumerate(arguments)]
        self._takes_options = taken[0][1] == ["options"]
        self._direct = [(at, each[1]) for at, each, _ in taken if each[0] == "leaf"]
        self._absent = [(at, name) for at, each, name in taken if each == ["plain", None]]
        known = {at for at, _ in (*self._direct, *self._absent)}.union(range(self._takes_options))
        self._others = [each for each in taken if each[0] not in known]
        self._carriers = {name: (leaf, axis) for name, leaf, axis in way["carriers"]}
        self._tensors = [
            (i, len(leaf["dims"]), leaf["in"])
            for i, leaf in enumerate(self._leaves)
            if leaf["dtype"] != INT
        ]
        self._numbers = [
            (i, leaf.get("size"), leaf.get("value"), leaf["in"])
            for i, leaf in enumerate(self._leaves)
            if leaf["dtype"] == INT
        ]
        self._ranges = [
            (name, *self._carriers[name], low, high)
            for name, low, high, _ in way["symbols"]
            if name in self._carriers
        ]
        self._order = [(i, piece, "axis" in self._leaves[i]) for i, piece in way["order"]]
        self._inputs = [i for i, _ in way["order"]]
        self._joint = [i for i, leaf in enumerate(self._leaves) if "axis" in leaf]
        #: Forms of inputs by which their sizes are right.
        self._good: set[InputForm] = set()
        reads = way["reads"]
        self._options, self._whole = reads["options"], frozenset(reads["whole"])
        self._idle = reads["idle"]
        self._patches, self._writes = reads["patches"], way["writes"]
        self._is_live = way["attends"] in (LIVE, BARE)
        self._gives_options = way["attends"] == LIVE
        self._same = same = way["same"]
        row = ["tuple", [["leaf", i] for i in range(len(same))]]
        #: Whether a block gives a plain tuple.
        self._is_row = way["results"] == row
        is_own = not way["writes"] and all(at < 0 for at in same)
        #: Whether a block gives just what its region does: a tensor, or a plain tuple of several.
        self._is_own = is_own and (
            way["results"] == ["leaf", 0] if len(same) == 1 else self._is_row
        )

    def of_call(self, taken: Sequence[Any], idle: Mapping[int, int]) -> Fitted | Reason:
        """Return what a region takes of a call; or why the host must make it.

        Args:
            taken: its arguments.
            idle: the place's ignored numbers by leaf, as they were.
        """
        leaves: list[Any] = [None] * len(self._leaves)
        found: list[Any] = [taken[0]] if self._takes_options else []
        form = None
        try:
            if self._takes_options and not isinstance(taken[0], dict):
                raise _OtherError(OPTIONS)
            for at, i in self._direct:
                leaves[i] = taken[at]
            for at, name in self._absent:
                if taken[at] is not None:
                    raise _OtherError(name)
            for at, template, name in self._others:
                _fill(template, taken[at], leaves, found, name)
            options = found[0] if found else {}
            if (problem := self._problem(options)) is not None:
                return problem
            if not self._joint:
                inputs = [leaves[i] for i in self._inputs]
                form = form_of(inputs)
            if form is None or form not in self._good:
                self._compare_sizes(leaves)
            if self._numbers or self._writes:
                self._compare(leaves, idle)
            if form is None:
                cut = {i: self._cut(leaves, i) for i in self._joint}
                inputs = [cut[i][at] if is_cut else leaves[i] for i, at, is_cut in self._order]
            elif len(self._good) < _MOST_FORMS:
                self._good.add(form)
        except _OtherError as error:
            return of("learned_another", name=error)
        return Fitted(inputs, leaves, options if self._gives_options else {}, form)

    def unpacked(self, results: Any, leaves: Sequence[Any]) -> Any:
        """Return what the host's block would.

        Args:
            results: of the region.
            leaves: of the call.
        """
        if self._is_own and isinstance(results, tuple) is self._is_row:
            return results
        given = iter(results if isinstance(results, tuple) else (results,))
        for _ in self._way["writes"]:
            next(given)  # it is in the input that was written into
        values = [leaves[at] if at >= 0 else next(given) for at in self._same]
        return tuple(values) if self._is_row else put_together(self._way["results"], values)

    def parted(self, result: Any, leaves: Sequence[Any]) -> list[torch.Tensor] | None:
        """Return the tensors of a block's result that are not arguments; None if it differs from
        what was learned: in its parts, or in the arguments that it returns.

        Args:
            leaves: of the call.
        """
        returned: list[Any] = []
        try:
            template = take_apart(result, returned)
        except LearnError:
            return None
        if template != self._way["results"]:
            return None
        pairs = list(zip(returned, self._same, strict=True))
        if any(_place(leaves, each) != at for each, at in pairs):
            return None
        own = [each for each, at in pairs if at < 0]
        memories = [memory(each) for each in own]
        shared = {memory(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        return None if len({*memories}) < len(own) or shared & {*memories} else own

    def _problem(self, options: Mapping[str, Any]) -> Reason | None:
        """Why the host must compute a block in a step with these options."""
        for name, value in self._options:
            if not is_same(options.get(name, ABSENT), value):
                return of("learned_option", name=name)
        for name in self._idle:
            if name not in options:
                return of("learned_option", name=name)
        for part in (PATCHES, REPLACEMENTS):
            if not (found := options.get(part)):
                continue
            names = found if part in self._whole else self._patches
            for name in names:
                if name in found:
                    return of("patches", name=name)
        if not self._is_live and options.get(ATTENTION) is not None:
            return of("learned_attention")
        return None

    def _compare_sizes(self, leaves: Sequence[Any]) -> None:
        """Compare what the form of the inputs tells."""
        for i, rank, name in self._tensors:
            value = leaves[i]
            if type(value) is not torch.Tensor or value.dim() != rank:
                raise _OtherError(name)
        for name, at, axis, low, high in self._ranges:
            size = leaves[at] if axis < 0 else leaves[at].shape[axis]
            if not low <= size <= high:
                raise _OtherError(name)

    def _compare(self, leaves: Sequence[Any], idle: Mapping[int, int]) -> None:
        for i, size, number, name in self._numbers:
            value = leaves[i]
            wanted = value if number is None else number
            if size is not None:
                wanted = leaves[size[0]].shape[size[1]]
            if type(value) is not int or value != wanted or idle.get(i, value) != value:
                raise _OtherError(name)
        if self._writes:
            memories = list(map(memory, leaves))
            if any(memories.count(memories[i]) > 1 for i in self._writes):
                raise _OtherError(self._leaves[self._writes[0]]["in"])

    def _size(self, part: Any, leaves: Sequence[Any]) -> int:
        if isinstance(part, int):
            return part
        leaf, axis = self._carriers[part]
        return int(leaves[leaf] if axis < 0 else leaves[leaf].shape[axis])

    def _cut(self, leaves: Sequence[Any], i: int) -> Sequence[Any]:
        """The pieces of a leaf, or the leaf unflattened."""
        leaf, value = self._leaves[i], leaves[i]
        axis, parts = leaf["axis"], [self._size(part, leaves) for part in leaf["of"]]
        whole = sum(parts) if leaf["how"] == SUM else prod(parts)
        if value.shape[axis] != whole:
            raise _OtherError(leaf["in"])
        if leaf["how"] == SUM:
            pieces: Sequence[Any] = value.split(parts, axis)
            return pieces
        return [value.unflatten(axis, parts)]


def _place(leaves: Sequence[Any], value: Any) -> int:
    """The leaf that a tensor is; -1: none."""
    return next((i for i, leaf in enumerate(leaves) if leaf is value), -1)


def _fill(template: Template, value: Any, leaves: list[Any], options: list[Any], name: str) -> None:
    """Find the leaves of an argument, and check that all else is equal."""
    tag, *content = template
    if tag == "leaf":
        leaves[content[0]] = value
        equal = isinstance(value, (torch.Tensor, int))
    elif tag == "options":
        equal = isinstance(value, dict)
        options.append(value)
    elif tag == "plain":
        equal = is_same(value, content[0])
    elif tag == "dtype":
        equal = value is getattr(torch, content[0])
    elif tag == "choice":
        equal = isinstance(value, Enum) and [name_of(type(value)), value.name] == content
    elif tag in ("list", "tuple"):
        equal = type(value) is kind_of(template) and len(value) == len(content[0])
        for each, part in zip(content[0], value if equal else (), strict=False):
            _fill(each, part, leaves, options, name)
    elif tag == "dict":
        equal = type(value) is dict and list(value) == [key for key, _ in content[0]]
        for key, each in content[0] if equal else ():
            _fill(each, value[key], leaves, options, key)
    else:
        equal = name_of(type(value)) == content[0]
        if tag == "attributes":
            equal = equal and attributes(value) == [key for key, _ in content[1]]
        for key, each in content[1] if equal else ():
            _fill(each, getattr(value, key), leaves, options, key)
    if not equal:
        raise _OtherError(name)
