"""Compare every call of every region with the host's own maths, for a developer in search of the
wrong one (`debugging.Debugging.verify`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..graphs.compiled_graph import CompiledGraph
from ..kinds.tolerance import tells_nothing
from ..plans.plan import Place
from ..reasons import of
from ..storing.comparisons import Comparisons
from ..weights.fetching import Fetched
from .verdicts import Verdicts
from .verifier import Sample, Verdict, Verifier

logger = logging.getLogger(__name__)

_REASON = of("verified_unlike")


class Verification:
    """What was compared in this process, and which kinds were reported."""

    def __init__(self) -> None:
        """Nothing is compared yet."""
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._calls = 0
        self._different = 0
        self._nearest = 0.0
        self._where = ""

    def take(self) -> str | None:
        """Return a line about what was compared since the last call, None for nothing."""
        with self._lock:
            if not self._calls:
                return None
            line = f"verified {self._calls} calls of regions with eager: "
            line += f"{self._different} differ" if self._different else "none differs"
            if self._where:
                line += f"; nearest to its tolerance ({self._nearest:.0%} of it) is {self._where}"
            self._calls = self._different = 0
            self._nearest, self._where = 0.0, ""
            return line

    def count(self, place: str, label: str, *, share: float, good: bool) -> bool:
        """Count a comparison; returns whether it is the first difference of its kind.

        Args:
            share: the error as a part of the tolerance.
            good: whether the call counts as right.
        """
        with self._lock:
            self._calls += 1
            if good:
                if share > self._nearest:
                    self._nearest, self._where = share, f"{place} ({label})"
                return False
            self._different += 1
            first = label not in self._told
            self._told.add(label)
            return first


class EveryCallVerifier(Verifier):
    """The comparisons of one place's graph if every call is compared.

    A graph that differs stays in use, but eager's result of each call is used: what follows is
    compared on the host's own activations.
    """

    def __init__(
        self,
        place: Place,
        graph: CompiledGraph,
        comparisons: Comparisons,
        model: Any,
        verdicts: Verdicts,
        verification: Verification,
    ) -> None:
        """Set up for one place's graph, as `Verifier` is.

        Args:
            place: the place.
            graph: its graph.
            comparisons, model, verdicts: as of `Verifier`.
            verification: what all places of the process share.
        """
        super().__init__(place, graph, comparisons, model, verdicts)
        self._verification = verification

    def covers(self, weight_class: str, elements: int) -> bool:
        """Every call is compared."""
        return False

    def sample(self, inputs: list[Any], elements: int) -> Sample:
        """Every element is compared."""
        return Sample(inputs, True, elements)

    def judge(
        self,
        ours: Sequence[torch.Tensor],
        references: tuple[torch.Tensor, ...],
        weights: Fetched,
        sample: Sample,
    ) -> Verdict:
        """Compare with the host's results; the first difference of a kind is logged."""
        found = self._difference(ours, references, sample.inputs)
        references, compared = references[: len(ours)], references
        good = found.is_good
        label = self._graph.description.label
        if not good and (
            tells_nothing(references) or self._is_ill_conditioned(sample, compared, found)
        ):
            self._verification.count(self._place.name, label, share=0.0, good=True)
            return Verdict(True, references)
        first = self._verification.count(self._place.name, label, share=found.share, good=good)
        if good:
            return Verdict(True, references)
        if first:
            logger.warning(
                "Region %s (%s) differs from eager by %.1e (relative L2, %.0e is allowed) at %s "
                "with %s weights; eager's result is used. Its graph is %s",
                self._place.name,
                label,
                found.error,
                found.error / found.share,
                self._sizes(sample.inputs),
                weights.weight_class,
                self._graph.key,
            )
        return Verdict(False, references, _REASON)

    def _sizes(self, inputs: list[Any]) -> str:
        """The sizes of a call, by the names of its inputs."""
        specs = self._graph.description.inputs
        return ", ".join(
            f"{spec.name} {'x'.join(map(str, v.shape)) if torch.is_tensor(v) else v}"
            for spec, v in zip(specs, inputs, strict=True)
        )
