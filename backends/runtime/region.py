"""One place of a model bound to a graph: checks, weights, the call, and the first-use
comparison."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from ..contract import InputSpec, Symbol
from ..regions.plan import Place
from ..tolerance import within
from .graphs import Graph
from .weights import ModelWeights, RegionWeights

logger = logging.getLogger(__name__)

#: Graphs index their tensors with 32 bits.
MAX_ELEMENTS = 2**31 - 1


class Region:
    """Computes one place by its graph: `region(*inputs)` gives the result, or None for the host to
    do it.

    A declined call is counted with its reason in `declined`; a graph that fails or differs from
    eager is dropped for good and its reason kept on the graph.
    """

    def __init__(
        self,
        place: Place,
        graph: Graph,
        source: ModelWeights,
        is_verified: Callable[[Graph, str], bool],
        verify: Callable[[Graph, str], None],
    ) -> None:
        """Args: the place, its ready graph, the model's weights, and the memory of comparisons."""
        self.place = place
        self.graph = graph
        self.declined: str | None = None
        #: How many calls the graph has served here.
        self.calls = 0
        self._source = source
        self._weights = RegionWeights(place.module, graph.weights, source)
        self._inputs = [
            _Check(spec, graph.description.symbols) for spec in graph.description.inputs
        ]
        self._is_verified = is_verified
        self._verify = verify
        self._trusted: set[str] = set()

    def __call__(self, *inputs: Any) -> torch.Tensor | None:
        graph = self.graph
        call = graph.call
        if call is None:
            return self.decline(graph.reason or "its graph was dropped")
        for check, value in zip(self._inputs, inputs, strict=True):
            problem = check.problem(value, self._source.device)
            if problem is not None:
                return self.decline(problem)
        if inputs[0].numel() * math.ceil(graph.work) > MAX_ELEMENTS:
            return self.decline("more elements than a graph with 32-bit indices can address")
        ready = [_aligned(value) if torch.is_tensor(value) else value for value in inputs]
        try:
            weights = self._weights.fetch()
        except ValueError as error:
            return self.decline(f"its weights are not what the graph takes: {error}")
        try:
            return self._run(call, weights.tensors, weights.weight_class, ready)
        finally:
            if weights.release is not None:
                weights.release()

    def decline(self, reason: str) -> torch.Tensor | None:
        """Leave this call to the host, for a reason in words; the None is the region's answer."""
        self.declined = reason
        return None

    def _run(
        self,
        call: Callable[[list[Any]], Any],
        weights: list[torch.Tensor],
        weight_class: str,
        inputs: list[Any],
    ) -> torch.Tensor | None:
        graph = self.graph
        try:
            result: torch.Tensor = call([*weights, *inputs])[0]
            if type(result) is not torch.Tensor:
                raise TypeError(f"a graph must return a tensor, got a {type(result).__name__}")
        except torch.OutOfMemoryError:
            return self.decline("out of memory in the graph; the host ran this call")
        except Exception as error:
            graph.drop(f"failed at run time: {type(error).__name__}: {error}")
            logger.warning("%s runs eager: %s", graph.description.label, graph.reason)
            return self.decline(graph.reason or "")
        if weight_class not in self._trusted:
            return self._compare(result, weight_class, inputs)
        self.calls += 1
        return result

    def _compare(
        self, result: torch.Tensor, weight_class: str, inputs: list[Any]
    ) -> torch.Tensor | None:
        """Compare with the host's own maths on the same inputs, once per file and class."""
        graph = self.graph
        if self._is_verified(graph, weight_class):
            self._trusted.add(weight_class)
            self.calls += 1
            return result
        reference = self.place.form.reference(self.place.module, *inputs)
        good, error = within(result, reference)
        if good:
            self._trusted.add(weight_class)
            self._verify(graph, weight_class)
            self.calls += 1
            return result
        graph.drop(f"differs from eager by {error:.1e} (relative L2) with {weight_class} weights")
        logger.warning("%s runs eager: %s", graph.description.label, graph.reason)
        self.decline(graph.reason or "")
        return reference


class _Check:
    """What one activation must be for a graph; compiled once, asked at each call."""

    def __init__(self, spec: InputSpec, symbols: tuple[Symbol, ...]) -> None:
        by_name = {s.name: s for s in symbols}
        self.name = spec.name
        self.is_int = spec.dtype == "int"
        self.dtype = None if self.is_int else getattr(torch, spec.dtype)
        self.rank = len(spec.dims)
        self.fixed = [(i, d) for i, d in enumerate(spec.dims) if isinstance(d, int)]
        self.ranges = [(i, by_name[d]) for i, d in enumerate(spec.dims) if isinstance(d, str)]

    def problem(self, value: Any, device: torch.device) -> str | None:
        if self.is_int:
            sizes: Any = (value,)
        else:
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                return f"{self.name} must be a plain tensor, got a {type(value).__name__}"
            if value.dtype is not self.dtype:
                return f"{self.name} must be {self.dtype}, got {value.dtype}"
            if value.device.type != device.type or value.dim() != self.rank:
                return f"{self.name} is on {value.device} with {value.dim()} dims"
            sizes = value.shape
        for i, size in self.fixed:
            if sizes[i] != size:
                return f"{self.name} must have size {size} in dim {i}, got {sizes[i]}"
        for i, symbol in self.ranges:
            if not symbol.minimum <= sizes[i] <= symbol.maximum:
                return (
                    f"{symbol.name} must be {symbol.minimum} to {symbol.maximum} "
                    f"for its graph, got {sizes[i]}"
                )
        return None


def _aligned(value: torch.Tensor) -> torch.Tensor:
    """Graphs take contiguous tensors at 16-byte addresses; a view is copied, as operators would."""
    if not value.is_contiguous():
        return value.contiguous()
    return value.clone() if value.data_ptr() % 16 else value
