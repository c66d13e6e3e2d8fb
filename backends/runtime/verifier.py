"""Comparing a graph with the host's own maths: on its first call, and on calls unlike that one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..graphs.compiled_graph import CompiledGraph
from ..host_api import layers
from ..kinds.layout import aligned
from ..kinds.tolerance import Difference, difference, nudged, relative_l2, tells_nothing
from ..operators import host_attention, host_layer
from ..operators.recorded import CalledOtherwiseError, Record, in_order
from ..plans.plan import Place, with_parts
from ..reasons import NOTHING, Reason, of
from ..storing.comparisons import Comparisons
from ..weights.fetching import Fetched
from .verdicts import Verdicts, named

logger = logging.getLogger(__name__)

#: A comparison takes at most so many elements of the largest tensor.
MAX_COMPARED = 2**26
#: A result is ill-conditioned where it moves so many times as far as its inputs.
NUDGE = 10
#: A good comparison speaks for calls of up to so many times its elements.
REACH = 16


class Sample(NamedTuple):
    """What to compare on: a call's inputs or a part of them, and whether that is all of them."""

    inputs: list[Any]
    whole: bool
    elements: int


class Verdict(NamedTuple):
    """The outcome of a comparison; `references` are the host's results on the same inputs (none if
    it is to make the call itself), and `reason` why the graph's are not used.
    """

    good: bool
    references: tuple[torch.Tensor, ...]
    reason: Reason = NOTHING


class Verifier:
    """The comparisons of one place's graph."""

    def __init__(
        self,
        place: Place,
        graph: CompiledGraph,
        comparisons: Comparisons,
        model: Any,
        verdicts: Verdicts,
    ) -> None:
        """Set up for one place's graph.

        Args:
            place: the place.
            graph: its graph.
            comparisons: the memory of comparisons, which others of its kind share.
            model: that the weights belong to.
            verdicts: which graphs are refused with these weights.
        """
        self._model, self._verdicts = model, verdicts
        self._place = place
        self._graph = graph
        self._comparisons = comparisons
        self._payload = "" if graph.loaded is None else graph.loaded.payload_sha256
        self._has_host_layers = any(host_layer.paths(graph.description.module))
        self._limits: dict[tuple[Hashable, ...], int] = {}
        #: Names of others' code in parts of the region; with other code it is compared anew.
        self.others = ""
        #: How others' code in parts of the region was called in the call that is compared; the
        #: host's maths get the same of it.
        self.record: Record | None = None

    def covers(self, weight_class: str, elements: int) -> bool:
        """Tell whether a call needs no comparison.

        Args:
            weight_class: of the weights that it takes (`WeightSource.name`).
            elements: of its largest tensor.
        """
        known = self.others, weight_class
        if elements <= self._limits.get(known, -1):
            return True
        compared = self._comparisons.most(self._key(), self._payload, weight_class, self._model)
        self._limits[known] = REACH * compared
        return elements <= REACH * compared

    def _key(self) -> str:
        return named(self._graph, self.others)

    def why_not(self) -> Reason | None:
        """Why the graph serves no call of this model now, if it does not."""
        unfit = self._graph.unfit.get(self.others)
        return unfit or self._verdicts.against(self._graph, self.others)

    def sample(self, inputs: list[Any], elements: int) -> Sample:
        """Choose what to compare on.

        Eager on all of it would need more memory beside the result than eager ever does.
        """
        specs = self._graph.description.inputs
        all_there_is = Sample(inputs, True, elements)
        kept = self._place.form.whole
        # Of rows, or which ones.
        counts = any(s.dtype == "int" or ("int" in s.dtype and kept is None) for s in specs)
        if elements <= MAX_COMPARED or counts:
            return all_there_is
        sizes = {
            dim: size
            for spec, value in zip(specs, inputs, strict=True)
            for dim, size in zip(spec.dims, value.shape, strict=True)
            if isinstance(dim, str) and dim not in (kept or ())
        }
        left = elements
        while left > MAX_COMPARED and max(sizes.values()) > 1:
            longest = max(sizes, key=lambda name: sizes[name])
            left = left * (sizes[longest] // 2) // sizes[longest]
            sizes[longest] //= 2
        corners = []
        for spec, value in zip(specs, inputs, strict=True):
            for axis, dim in enumerate(spec.dims):
                if dim in sizes:
                    value = value.narrow(axis, 0, sizes[dim])
            corners.append(aligned(value, self._graph.description.layout))
        return Sample(corners, False, elements)

    def compare(
        self,
        call: Callable[[list[Any]], Any],
        results: Sequence[torch.Tensor],
        weights: Fetched,
        sample: Sample,
    ) -> Verdict:
        """Compare with the host's own maths on the same inputs.

        Raises:
            torch.OutOfMemoryError: there is no memory for both.
            Whatever the host's code raises.
        """
        ours = results
        if not sample.whole:
            if self.record is not None:
                self.record.clear()
            ours = call([*weights.tensors, *sample.inputs])
        return self.judge(ours, self._computed(sample.inputs), weights, sample)

    def judge(
        self,
        ours: Sequence[torch.Tensor],
        references: tuple[torch.Tensor, ...],
        weights: Fetched,
        sample: Sample,
    ) -> Verdict:
        """As `compare`, of two given results."""
        graph = self._graph
        if (problem := _of_other_dtypes(ours, references)) is not None:
            self._verdicts.rest(graph, self.others, problem)
            return Verdict(False, references, problem)
        found = self._difference(ours, references, sample.inputs)
        references, compared = references[: len(ours)], references
        if tells_nothing(references):
            return Verdict(True, references)  # inconclusive; the next call is compared
        if found.is_good:
            self._equals(weights, sample)
            return Verdict(True, references)
        if self._is_ill_conditioned(sample, compared, found):
            return Verdict(True, references)
        if self.record is not None and self.others:  # only with this code, as far as is known
            reason = of("unlike_with_others", error=f"{found.error:.1e}")
            self._verdicts.refuse(graph, self.others, reason)
            logger.warning("%s runs at normal speed: %s", graph.description.label, reason)
            return Verdict(False, (), reason)  # the code may do more than return a result
        reason = self._verdicts.differs(
            graph, self.others, weights.weight_class, found.error, weights.tensors
        )
        logger.warning("%s runs at normal speed: %s", graph.description.label, reason)
        return Verdict(False, references, reason)

    def _equals(self, weights: Fetched, sample: Sample) -> None:
        """Note that a graph gave what the host does."""
        self._verdicts.good(self._graph, self.others, weights.weight_class)
        self._comparisons.add(
            self._key(), self._payload, weights.weight_class, sample.elements, self._model
        )

    def _difference(
        self, results: Sequence[torch.Tensor], references: Sequence[torch.Tensor], inputs: list[Any]
    ) -> Difference:
        in_full = partial(self._in_full, inputs) if self._has_host_layers else None
        if self.record is not None:
            results = (*results, *self.record.given)
        return difference(results, references, inputs, in_full=in_full)

    def _in_full(self, inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        with layers.multiplying_in_full(self._place.module):
            return self._computed(inputs)

    def _computed(self, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """The host's results on these inputs, which are not changed. Others' code, in parts of the
        region or an attention, is not called again but returns what it returned to the graph;
        nothing if the host calls it differently.
        """
        form, module, record = self._place.form, self._place.module, self.record
        if record is None:
            return form.computed(module, inputs)
        again, seen = record.again(module)
        try:
            with host_attention.asking(record.attending_again(seen)):
                results = form.computed(with_parts(module, again), inputs)
        except CalledOtherwiseError:
            return ()
        return (*results, *in_order(seen))

    def _is_ill_conditioned(
        self, sample: Sample, references: Sequence[torch.Tensor], found: Difference
    ) -> bool:
        """Tell whether eager itself moves that far when its inputs move by almost nothing.

        A norm over nearly equal values, as of an empty latent, magnifies the last bit of either.
        Such a call is inconclusive.
        """
        if len(found.errors) != len(references) or not all(map(math.isfinite, found.errors)):
            return False  # where eager overflows as well, any error would look small
        inputs = [nudged(value, min(found.bounds) / NUDGE) for value in sample.inputs]
        moved = map(relative_l2, self._computed(inputs), references)
        return all(
            error <= most or (far > most and error <= NUDGE * far)
            for error, most, far in zip(*found, moved, strict=True)
        )


def _of_other_dtypes(
    results: Sequence[torch.Tensor], references: Sequence[torch.Tensor]
) -> Reason | None:
    """Say that the host returns other dtypes in this call than the graph was built for: their
    difference is inconclusive.
    """
    for ours, theirs in zip(results, references, strict=False):
        if ours.dtype is not theirs.dtype:
            return of("other_dtypes", theirs=theirs.dtype, ours=ours.dtype)
    return None
