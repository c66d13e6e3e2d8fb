"""Whether graphs may be used with the weights of one model, by what comparisons gave.

A graph may be wrong only with some weights, such as those that overflow. So a failed comparison
refuses the pair; it refuses the graph itself once it failed with several models' weights and passed
with none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..graphs.compiled_graph import CompiledGraph
from ..host_api.memory import patches_of
from ..reasons import Reason, of

#: So many models' weights speak against a graph.
SEVERAL = 2
#: So many elements at either end of a weight tell it from another model's.
_TOLD_BY = 256


@dataclass(eq=False)
class Clearance:
    """Whether one graph may be used on its card, with one model's weights and one code of others.

    Attributes:
        compared: the elements of the largest call in which it gave what the host does, by sort of
            call.
        resting: why the host makes its calls until the model's next run.
        refused: why it does as long as the model has the same patches.
        doubts: with which classes of weights it differed once.
    """

    compared: dict[Hashable, int] = field(default_factory=dict)
    resting: Reason | None = None
    refused: Reason | None = None
    doubts: set[str] = field(default_factory=set)

    @property
    def problem(self) -> Reason | None:
        """Why the graph is not used now, if so."""
        return self.refused or self.resting


class Verdicts:
    """Of one model; kept as long as the model."""

    def __init__(self) -> None:
        """Nothing is compared yet."""
        self._clearances: dict[tuple[str, int, str], Clearance] = {}
        self._patches: Any = None
        #: What tells these weights from other models'; the first ones that a graph differed with.
        self._weights: dict[str, str] = {}

    def of(self, graph: CompiledGraph, others: str = "") -> Clearance:
        """Return what is known of a graph.

        Args:
            others: names of others' code in parts of the region.
        """
        return self._clearances.setdefault((graph.key, graph.card, others), Clearance())

    def begin_run(self, model: Any, graphs: Sequence[CompiledGraph]) -> None:
        """Use resting graphs again; with other patches, compare again what differed.

        Args:
            model: the module on which the host's patcher notes where the weights are.
            graphs: of the model.
        """
        patches, rested = patches_of(model), False
        is_other, self._patches = patches != self._patches, patches
        for each in list(self._clearances.values()):
            if is_other:
                each.doubts.clear()
                each.resting, each.refused = each.problem, None
            rested |= each.resting is not None
            each.resting = None
        if rested:
            for graph in graphs[:1]:
                graph.changed()

    def compare_anew(self) -> None:
        """Compare each graph again at its next call."""
        for each in list(self._clearances.values()):
            each.compared.clear()

    def differs(
        self,
        graph: CompiledGraph,
        others: str,
        weight_class: str,
        error: float,
        weights: Sequence[torch.Tensor],
    ) -> Reason:
        """Note that a graph gave another result: it rests until the next run, and is refused with
        these weights if it differs again then. Another node may have changed the maths around this
        one call.

        Args:
            weights: that it was called with.
        """
        clearance = self.of(graph, others)
        reason = of("differs", error=f"{error:.1e}", weights=weight_class)
        if weight_class not in clearance.doubts:
            clearance.doubts.add(weight_class)
            clearance.resting = reason = of("once_more", why=reason)
        else:
            if graph.key not in self._weights:
                self._weights[graph.key] = _told_by(weights)
            graph.wrong_with.add(self._weights[graph.key])
            if not graph.is_proven and len(graph.wrong_with) >= SEVERAL:
                graph.drop(reason)
                return reason
            clearance.refused = reason
        graph.changed()
        return reason


def _told_by(weights: Sequence[torch.Tensor]) -> str:
    """Return what identifies weights. It is the same for a model that is loaded again."""
    digest = hashlib.sha256()
    for tensor in weights:
        flat = tensor.detach().reshape(-1)
        ends = torch.cat((flat[:_TOLD_BY], flat[-_TOLD_BY:]))
        digest.update(ends.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
