"""Which graphs comparisons have refused with the weights of one model.

A graph may be wrong only with some weights, such as those that overflow. So a failed comparison
refuses the pair; it refuses the graph itself once it failed with several models' weights and passed
with none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from ..graphs.compiled_graph import CompiledGraph
from ..host_api.memory import patches_of
from ..reasons import Reason, of

#: So many models' weights speak against a graph.
SEVERAL = 2
#: So many elements at either end of a weight tell it from another model's.
_TOLD_BY = 256


class Verdicts:
    """Of one model; kept as long as the model."""

    def __init__(self) -> None:
        """No graph is refused yet."""
        #: Until the model's next run; by the name of what was compared.
        self._resting: dict[str, Reason] = {}
        #: For as long as the model has the same patches.
        self._refused: dict[str, Reason] = {}
        #: What differed once, with which class of weights.
        self._doubts: set[tuple[str, str]] = set()
        self._patches: Any = None
        #: What tells these weights from other models'; the first ones that a graph differed with.
        self._weights: dict[str, str] = {}

    def begin_run(self, model: Any, graphs: Sequence[CompiledGraph]) -> None:
        """Use resting graphs again; with other patches, compare again what differed.

        Args:
            model: the module on which the host's patcher notes where the weights are.
            graphs: of the model.
        """
        patches = patches_of(model)
        if patches != self._patches:
            self._patches = patches
            self._doubts.clear()
            self._resting |= self._refused
            self._refused = {}
        if self._resting:
            self._resting = {}
            for graph in graphs[:1]:
                graph.changed()

    def against(self, graph: CompiledGraph, others: str = "") -> Reason | None:
        """Say why a graph does not serve calls of this model now, if so.

        Args:
            others: names of others' code in parts of the region.
        """
        if not self._resting and not self._refused:
            return None
        name = named(graph, others)
        return self._refused.get(name) or self._resting.get(name)

    def rest(self, graph: CompiledGraph, others: str, reason: Reason) -> None:
        """Leave its calls to the host until the model's next run begins."""
        self._resting[named(graph, others)] = reason
        graph.changed()

    def refuse(self, graph: CompiledGraph, others: str, reason: Reason) -> None:
        """Leave its calls to the host as long as the model has the same patches."""
        self._refused[named(graph, others)] = reason
        graph.changed()

    def good(self, graph: CompiledGraph, others: str, weight_class: str) -> None:
        """Note that a graph gave what the host does."""
        self._doubts.discard((named(graph, others), weight_class))
        graph.is_proven = True

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
        reason = of("differs", error=f"{error:.1e}", weights=weight_class)
        name = named(graph, others)
        if (name, weight_class) not in self._doubts:
            self._doubts.add((name, weight_class))
            reason = of("once_more", why=reason)
            self.rest(graph, others, reason)
            return reason
        if graph.key not in self._weights:
            self._weights[graph.key] = _told_by(weights)
        graph.wrong_with.add(self._weights[graph.key])
        if graph.is_proven or len(graph.wrong_with) < SEVERAL:
            self.refuse(graph, others, reason)
        else:
            graph.drop(reason)
        return reason


def named(graph: CompiledGraph, others: str) -> str:
    """Return the name of what is compared: the graph, by card, with others' code."""
    card = f" on card {graph.card}" if graph.card else ""
    return f"{graph.key}{card} {others}".rstrip()


def _told_by(weights: Sequence[torch.Tensor]) -> str:
    """Return what identifies weights. It is the same for a model that is loaded again."""
    digest = hashlib.sha256()
    for tensor in weights:
        flat = tensor.detach().reshape(-1)
        ends = torch.cat((flat[:_TOLD_BY], flat[-_TOLD_BY:]))
        digest.update(ends.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
