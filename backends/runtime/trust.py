"""Comparing a graph with the host's own maths: on its first call, and on calls unlike that one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..families.plan import Place
from ..kinds.layout import aligned
from ..kinds.tolerance import bound, nudged, relative_l2, tells_nothing, within
from ..storing.comparisons import Comparisons
from ..weights.fetching import Fetched
from .graph import Graph

logger = logging.getLogger(__name__)

#: A comparison takes at most so many elements of the largest tensor.
MAX_COMPARED = 2**26
#: A result is ill-conditioned where it moves so many times as far as its inputs.
NUDGE = 10
#: A good comparison speaks for calls of up to so many times its elements.
REACH = 16


class Sample(NamedTuple):
    """What to compare on: a call's inputs or a corner of them, and whether it is all there is."""

    inputs: list[Any]
    whole: bool
    elements: int


class Verdict(NamedTuple):
    """What a comparison said; `reference` is the host's result on the same inputs, and `reason` why
    the graph's is not used.
    """

    good: bool
    reference: torch.Tensor
    reason: str = ""


class Trust:
    """The comparisons of one place's graph."""

    def __init__(self, place: Place, graph: Graph, comparisons: Comparisons) -> None:
        """Args: the place, its graph, and the memory of comparisons, which others of its kind
        share.
        """
        self._place = place
        self._graph = graph
        self._comparisons = comparisons
        self._limits: dict[str, int] = {}

    def covers(self, weight_class: str, elements: int) -> bool:
        """Tell whether a call needs no comparison.

        Args:
            weight_class: of the weights that it takes (`weights.CLASSES`).
            elements: of its largest tensor.
        """
        if elements <= self._limits.get(weight_class, -1):
            return True
        graph = self._graph
        compared = self._comparisons.most(graph.key, graph.payload_sha256, weight_class)
        self._limits[weight_class] = REACH * compared
        return elements <= REACH * compared

    def sample(self, inputs: list[Any], elements: int) -> Sample:
        """Choose what to compare on.

        Eager on all of it would need more memory beside the result than eager ever does.
        """
        specs = self._graph.description.inputs
        all_there_is = Sample(inputs, True, elements)
        one_size = self._graph.description.is_special
        if elements <= MAX_COMPARED or one_size or any(spec.dtype == "int" for spec in specs):
            return all_there_is
        sizes = {
            dim: size
            for spec, value in zip(specs, inputs, strict=True)
            for dim, size in zip(spec.dims, value.shape, strict=True)
            if isinstance(dim, str)
        }
        left = elements
        while left > MAX_COMPARED and max(sizes.values()) > 1:
            longest = max(sizes, key=lambda name: sizes[name])
            left = left * (sizes[longest] // 2) // sizes[longest]
            sizes[longest] //= 2
        corners = []
        for spec, value in zip(specs, inputs, strict=True):
            for axis, dim in enumerate(spec.dims):
                if isinstance(dim, str):
                    value = value.narrow(axis, 0, sizes[dim])
            corners.append(aligned(value, self._graph.description.layout))
        return Sample(corners, False, elements)

    def compare(
        self,
        call: Callable[[list[Any]], Any],
        result: torch.Tensor,
        weights: Fetched,
        sample: Sample,
    ) -> Verdict:
        """Compare with the host's own maths on the same inputs; a graph that differs is dropped.

        Raises:
            torch.OutOfMemoryError: there is no memory for both.
            Whatever the host's code raises.
        """
        graph = self._graph
        ours = result if sample.whole else call([*weights.tensors, *sample.inputs])[0]
        reference = self._place.form.reference(self._place.module, *sample.inputs)
        good, error = within(ours, reference)
        if tells_nothing(reference):
            return Verdict(True, reference)  # right as far as that goes; the next one is compared
        if good:
            self._comparisons.add(
                graph.key, graph.payload_sha256, weights.weight_class, sample.elements
            )
            return Verdict(True, reference)
        if self._is_ill_conditioned(sample, reference, error):
            return Verdict(True, reference)
        graph.drop(
            f"differs from eager by {error:.1e} (relative L2) with {weights.weight_class} weights"
        )
        logger.warning("%s runs eager: %s", graph.description.label, graph.reason)
        return Verdict(False, reference, graph.reason or "")

    def _is_ill_conditioned(self, sample: Sample, reference: torch.Tensor, error: float) -> bool:
        """Tell whether eager itself moves that far when its inputs move by next to nothing.

        A norm over nearly equal values makes much of the last bit of either: an empty latent, say.
        Such a call tells nothing of the graph.
        """
        allowed = bound(reference)
        inputs = [nudged(value, allowed / NUDGE) for value in sample.inputs]
        moved = relative_l2(self._place.form.reference(self._place.module, *inputs), reference)
        return moved > allowed and error <= NUDGE * moved
