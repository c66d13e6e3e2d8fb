"""Comparing a graph with the host's own maths: on its first call, and on calls unlike that one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..graphs.compiled_graph import CompiledGraph
from ..host_api import layers
from ..host_api.options import ATTENTION
from ..kinds.layout import aligned
from ..kinds.tolerance import Outcome, judge
from ..operators import host_attention, host_layer
from ..operators.call_context import options_of_step
from ..operators.recorded import CalledOtherwiseError, RecordedCall, in_order
from ..plans.plan import Place, with_parts
from ..reasons import NOTHING, Reason, of
from ..weights.fetching import Fetched
from .specializations import CallStats
from .verdicts import Clearance
from .verification import Verification

logger = logging.getLogger(__name__)

#: A comparison takes at most so many elements of the largest tensor.
MAX_COMPARED = 2**26
#: A good comparison speaks for calls of up to so many times its elements.
REACH = 16
#: Comparisons of one sort of call that tell nothing before no more are made at a learned place.
MOST_UNSURE = 3


class Sample(NamedTuple):
    """What to compare on: a call's inputs or a part of them, and whether that is all of them."""

    inputs: list[Any]
    whole: bool
    elements: int


class Verdict(NamedTuple):
    """The outcome of a comparison; `references` are the host's results on the same inputs (none if
    it is to make the call itself), and `reason` why the graph's are not used.
    """

    outcome: Outcome
    references: tuple[torch.Tensor, ...]
    reason: Reason = NOTHING


class Verifier:
    """The comparisons of one place's graph.

    A graph is compared once for each model, class of weights and larger size; at a learned place,
    for each place and structure of its model's call; for a developer, at every call.
    """

    def __init__(
        self,
        place: Place,
        graph: CompiledGraph,
        account: CallStats,
        verification: Verification | None = None,
    ) -> None:
        """Set up for one place's graph.

        Args:
            place: the place.
            graph: its graph.
            account: what the model's regions note of their calls.
            verification: what is kept where every call is compared; None: they are not.
        """
        self._place = place
        self._graph = graph
        self._account = account
        self._verification = verification
        self._payload = "" if graph.loaded is None else graph.loaded.payload_sha256
        self._has_host_layers = any(host_layer.paths(graph.description.module))
        self._clearances: dict[str, Clearance] = {}
        #: Of a learned place, as `Clearance.compared`; and how often comparisons were inconclusive.
        self._here: dict[Hashable, int] = {}
        self._unsure: Counter[Hashable] = Counter()
        #: Why the graph does not serve at a learned place, whatever it computes.
        self.misplaced: Reason | None = None
        #: How others' code in parts of the region was called in the call that is compared; the
        #: host's maths get the same of it.
        self.record: RecordedCall | None = None
        self.serve("")

    def serve(self, others: str) -> None:
        """Say of which calls all that follows is.

        Args:
            others: names of others' code in parts of the region; with other code it is compared
                anew.
        """
        found = self._clearances.get(others)
        if found is None:
            found = self._clearances[others] = self._account.verdicts.of(self._graph, others)
        self.others, self._clearance = others, found

    def why_not(self) -> Reason | None:
        """Say why the graph serves no call of this model now, if so."""
        return self._graph.unfit.get(self.others) or self._clearance.problem

    def covers(self, weight_class: str, elements: int) -> bool:
        """Tell whether a call needs no comparison.

        Args:
            weight_class: of the weights that it takes (`WeightSource.name`).
            elements: of its largest tensor.
        """
        if self._verification is not None:
            return False
        return elements <= REACH * self._compared.get(self._sort(weight_class), -1)

    @property
    def _compared(self) -> dict[Hashable, int]:
        return self._here if self._place.form.beside else self._clearance.compared

    def _sort(self, weight_class: str) -> Hashable:
        """What a comparison holds for."""
        return self._payload, self.others, weight_class, self._account.structure

    def why_uncompared(self, weight_class: str) -> Reason | None:
        """Why a call of a learned place cannot be compared, if so."""
        if not self._place.form.beside or self.misplaced is not None:
            return self.misplaced
        if self._unsure[self._sort(weight_class)] >= MOST_UNSURE:
            return of("learned_unsure")
        # Others' code must not be called by the host and by the graph.
        is_others = options_of_step().get(ATTENTION) is not None
        return of("learned_unproven") if is_others else None

    def note_unsure(self, weight_class: str) -> None:
        """Note an inconclusive comparison. At a learned place it counts as one, because repeating
        it with the same call would not help.
        """
        if self._place.form.beside:
            self._account.compared += 1
            self._unsure[self._sort(weight_class)] += 1

    def sample(self, inputs: list[Any], elements: int) -> Sample:
        """Choose what to compare on.

        Eager on all of it would need more memory beside the result than eager ever does.
        """
        all_there_is = Sample(inputs, True, elements)
        if self._verification is not None:
            return all_there_is
        specs = self._graph.description.inputs
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
        graph, weight_class = self._graph, weights.weight_class
        found = judge(
            ours if self.record is None else (*ours, *self.record.given),
            references,
            sample.inputs,
            in_full=partial(self._in_full, sample.inputs) if self._has_host_layers else None,
            again=self._computed,
        )
        references, outcome, reason = references[: len(ours)], found.outcome, NOTHING
        pairs = [(one.dtype, other.dtype) for one, other in zip(ours, references, strict=False)]
        otherwise = next((pair for pair in pairs if pair[0] is not pair[1]), None)
        if self._verification is not None:
            self._verification.note(self._place.name, graph, found, sample.inputs, weight_class)
            reason = of("verified_unlike")
        elif otherwise is not None:  # the host returns others in this call: that tells nothing
            reason = of("other_dtypes", theirs=otherwise[1], ours=otherwise[0])
            self._clearance.resting, outcome = reason, Outcome.BAD
            graph.changed()
        elif outcome is Outcome.UNSURE:  # the next call is compared
            self.note_unsure(weight_class)
        elif outcome is Outcome.GOOD:
            self._equals(weight_class, sample.elements)
        else:
            if self.record is not None and self.others:  # only with this code, as far as is known
                reason = of("unlike_with_others", error=f"{found.error:.1e}")
                self._clearance.refused = reason
                graph.changed()
                references = ()  # the code may do more than return a result
            else:
                reason = self._account.verdicts.differs(
                    graph, self.others, weight_class, found.error, weights.tensors
                )
            logger.warning("%s runs at normal speed: %s", graph.description.label, reason)
        return Verdict(outcome, references, reason)

    def _equals(self, weight_class: str, elements: int) -> None:
        """Note that a graph gave what the host does."""
        self._account.compared += 1
        self._graph.is_proven = True
        self._clearance.doubts.discard(weight_class)
        sort = self._sort(weight_class)
        self._compared[sort] = max(elements, self._compared.get(sort, 0))

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
