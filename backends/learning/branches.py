"""Sizes at which a block's code branches: then it has two ways, by ranges of the size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .form import Learned
from .notes import Listener
from .steps import MetaModel
from .ways import INT, Way


def by_ranges(way: Way, block: torch.nn.Module, twin: MetaModel, listener: Listener) -> list[Way]:
    """Return a way for all sizes, or its ways by the ranges of the first size at which they differ,
    without ranges in which the block fails or differs at each size.

    Args:
        way: for all sizes.
        block: on fakes.
        twin: of the block's model.
        listener: of the lesson.
    """
    usual = {name: example for name, *_, example in way["symbols"]}
    for name, low, high, example in way["symbols"]:

        def at(size: int, _name: str = name) -> list[str] | None:
            return _operators(way, block, twin, listener, {**usual, _name: size})

        first, least = at(example), max(2, low)
        if first is None:
            continue
        bottom = _last_alike(at, first, example, least)
        top = _last_alike(at, first, example, high)
        if (bottom, top) == (least, high):
            continue
        found = [_within(way, name, low if bottom == least else bottom, top, example)]
        for one, end in ((bottom - 1, least), (top + 1, high)):
            if least <= one <= high and (beyond := at(one)) is not None and beyond == at(end):
                found.append(_within(way, name, min(one, end), max(one, end), one))
        return found
    return [way]


def _last_alike(at: Callable[[int], Any], first: Any, good: int, end: int) -> int:
    """The size nearest to an end at which the operators are the same as from a good one on."""
    if at(end) == first:
        return end
    bad = end
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if at(middle) == first else (good, middle)
    return good


def _within(way: Way, name: str, low: int, high: int, example: int) -> Way:
    """A way for a range of one size, with its own name."""
    bounded = f"{name}_{low}_{high}"

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(each) for each in value]
        return bounded if value == name else value

    leaves = [
        {
            key: renamed(each) if key in ("dims", "of", "symbol") else each
            for key, each in leaf.items()
        }
        for leaf in way["leaves"]
    ]
    symbols = sorted(
        [bounded, low, high, min(max(example, low), high)] if each[0] == name else each
        for each in way["symbols"]
    )
    carriers = [[renamed(each[0]), *each[1:]] for each in way["carriers"]]
    return {**way, "leaves": leaves, "symbols": symbols, "carriers": sorted(carriers)}


def _operators(
    way: Way, block: torch.nn.Module, twin: MetaModel, listener: Listener, sizes: Mapping[str, int]
) -> list[str] | None:
    """The operators that a block runs at these sizes; None if it fails."""
    form = Learned(way)
    with twin.fakes(), listener.noting() as notes:
        inputs: list[Any] = []
        for spec in form.inputs(block, twin.dtype):
            shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.dims]
            dtype = None if spec.dtype == INT else getattr(torch, spec.dtype)
            inputs.append(shape[0] if dtype is None else torch.empty(shape, dtype=dtype))
        try:
            with listener.operators():
                form.computed(block, inputs)
        except Exception:  # of the host's code, at a size that it does not accept
            return None
    return notes.names
