"""Which calls a graph takes at a place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..contract import InputSpec, RegionSpec, Symbol
from ..graphs.compiled_graph import CompiledGraph
from ..kinds.layout import InputForm, aligned
from ..reasons import Reason, of
from ..weights.source import same_device
from .specializations import ROWED, WIDE, GuardFailure

#: Graphs index their tensors with 32 bits.
MAX_ELEMENTS = 2**31 - 1
#: How many good input forms are remembered.
MAX_KNOWN = 64

_TOO_LARGE = of("too_many_elements")


class InputGuard:
    """Which calls one graph accepts at one place."""

    def __init__(self, graph: CompiledGraph, device: torch.device) -> None:
        """Set up.

        Args:
            device: where the model is.
        """
        description = graph.description
        self._checks = _checks_of(description)
        rowed = ROWED.of(description)
        self._rowed = _checks_of(rowed) if rowed.inputs != description.inputs else None
        self._device = device
        self._layout = description.layout
        self._is_wide = description.wide
        self._work = 1 if graph.loaded is None else math.ceil(graph.loaded.work)
        #: The largest tensor's elements by form, of calls whose inputs are taken as they come.
        self.good: dict[InputForm, int] = {}

    def misfit(self, inputs: Sequence[Any], form: InputForm) -> GuardFailure | None:
        """Say why the graph does not take a call; None: it does."""
        if form in self.good:
            return None
        if (problem := self._problem(inputs, self._checks)) is not None:
            is_rowed = self._rowed is not None and self._problem(inputs, self._rowed) is None
            return GuardFailure(problem, ROWED if is_rowed else None)
        if not self._is_wide and self._elements(inputs) > MAX_ELEMENTS:
            return GuardFailure(_TOO_LARGE, WIDE)
        return None

    def made_ready(self, inputs: Sequence[Any], form: InputForm) -> tuple[list[Any], int]:
        """Return an accepted call's inputs as the graph reads them, and the elements of its largest
        tensor.
        """
        elements = self._elements(inputs)
        ready = [aligned(v, self._layout) if torch.is_tensor(v) else v for v in inputs]
        plain = all(isinstance(value, int) or type(value) is torch.Tensor for value in inputs)
        if plain and all(mine is given for mine, given in zip(ready, inputs, strict=True)):
            if len(self.good) >= MAX_KNOWN:
                self.good.clear()
            self.good[form] = elements
        return ready, elements

    def _problem(self, inputs: Sequence[Any], checks: Sequence[_Check]) -> Reason | None:
        """Why a graph with these checks cannot take the inputs, or None."""
        sizes: dict[str, tuple[int, str]] = {}
        for check, value in zip(checks, inputs, strict=True):
            problem = check.problem(value, self._device)
            if problem is not None:
                return problem
            for symbol, size in check.sizes(value):
                known, name = sizes.setdefault(symbol, (size, check.name))
                if known != size:  # the host's operators may broadcast, a graph reads past its end
                    there = {"one": known, "name": name, "other": size, "another": check.name}
                    return of("sizes_differ", symbol=symbol, **there)
        return None

    def _elements(self, inputs: Sequence[Any]) -> int:
        """Elements of the largest tensor of a call."""
        first: torch.Tensor = inputs[0]
        return first.numel() * self._work


class _Check:
    """What one activation must be for a graph."""

    def __init__(self, spec: InputSpec, symbols: tuple[Symbol, ...]) -> None:
        by_name = {s.name: s for s in symbols}
        self.name = spec.name
        self.is_int = spec.dtype == "int"
        self.dtype = None if self.is_int else getattr(torch, spec.dtype)
        self.rank = len(spec.dims)
        self.fixed = [(i, d) for i, d in enumerate(spec.dims) if isinstance(d, int)]
        self.ranges = [(i, by_name[d]) for i, d in enumerate(spec.dims) if isinstance(d, str)]

    def sizes(self, value: Any) -> list[tuple[str, int]]:
        """Return what the symbols are in this value, which has no problem."""
        given = (value,) if self.is_int else value.shape
        return [(symbol.name, int(given[i])) for i, symbol in self.ranges]

    def problem(self, value: Any, device: torch.device) -> Reason | None:
        if self.is_int:
            sizes: Any = (value,)
        else:
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                return of("no_plain_tensor", name=self.name, sort=type(value).__name__)
            if value.dtype is not self.dtype:
                return of("wrong_dtype", name=self.name, wanted=self.dtype, got=value.dtype)
            if not same_device(value.device, device) or value.dim() != self.rank:
                return of("wrong_place", name=self.name, device=value.device, count=value.dim())
            sizes = value.shape
        for i, size in self.fixed:
            if sizes[i] != size:
                told = {"name": self.name, "wanted": size, "dim": i, "got": sizes[i]}
                return of("wrong_size", **told)
        for i, symbol in self.ranges:
            if not symbol.minimum <= sizes[i] <= symbol.maximum:
                bounds = {"minimum": symbol.minimum, "maximum": symbol.maximum}
                return of("out_of_range", name=symbol.name, **bounds, got=sizes[i])
        return None


def _checks_of(description: RegionSpec) -> list[_Check]:
    return [_Check(spec, description.symbols) for spec in description.inputs]
