"""Models whose blocks' calls are learned, and whole steps by what was learned beside the host's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from warmgraph_backends.contract import RegionSpec
from warmgraph_backends.graphs.compiled_graph import CompiledGraph
from warmgraph_backends.learning.family import family_of
from warmgraph_backends.learning.form import Learned
from warmgraph_backends.learning.record import learn_root
from warmgraph_backends.operators.call_context import using
from warmgraph_backends.plans.describe import make_twin
from warmgraph_backends.plans.plan import Place, Plan
from warmgraph_backends.plans.region_code import RegionCode
from warmgraph_backends.plans.specs import describe_place
from warmgraph_backends.reasons import Reason
from warmgraph_backends.runtime.placing import Placing
from warmgraph_backends.runtime.written import leave
from warmgraph_backends.worker.export import export
from warmgraph_tools.watched import watched

from .lab import relative

Record = dict[str, Any]
#: Of a made-up model: batch, height, width, tokens; the first is watched.
CALLS = ((1, 4, 6, 5), (2, 4, 6, 5), (1, 8, 12, 1), (3, 2, 3, 17), (1, 10, 12, 9))


def arguments(batch: int, height: int, width: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """What a made-up model is called with."""
    generator = torch.Generator().manual_seed(batch + height)
    return (
        torch.randn(batch, 64, height, width, generator=generator),
        torch.rand(batch, generator=generator),
        torch.randn(batch, tokens, 64, generator=generator),
    )


def learned_of(make: Callable[[], torch.nn.Module], *args: Any, **kwargs: Any) -> Record:
    """The record of a made-up model from one call of it."""
    root = make()
    facts = watched(root, lambda: root(*args, **kwargs))
    record: Record = json.loads(json.dumps(learned_from(make, facts)))
    return record


def learned_from(make: Callable[[], torch.nn.Module], facts: Any) -> Record:
    """The record of a made-up model from what was watched."""

    def in_dtype(dtype: torch.dtype) -> torch.nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return make()
        finally:
            torch.set_default_dtype(before)

    return learn_root(in_dtype, facts, "float32")


class Regions:
    """What was learned of a root module, in place of its blocks.

    Attributes:
        declined: why calls were the host's.
        served: how many were not.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        record: Record,
        *,
        exported: bool = False,
        built: Callable[[RegionSpec], CompiledGraph] | None = None,
        lacking: str | None = None,
    ) -> None:
        """Set up.

        Args:
            lacking: the name of a form that has no graph; blocks without any are the host's.
            exported: whether blocks are computed by a worker's export, or by the form's reference
                over a twin.
            built: gives the graph that computes them.
        """
        [cut] = family_of(record).roots.values()
        plan = cut(root)
        assert isinstance(plan, Plan)
        self.plan, self.declined, self.served = plan, [], 0
        self._exported, self._built = exported, built
        self._made: dict[str, Any] = {}
        self._placed = [
            each
            for dispatch in plan.dispatches
            if any(p.form.name != lacking for p in dispatch.regions)
            for each in dispatch.forwards(
                [None if p.form.name == lacking else _Call(self, p) for p in dispatch.regions]
            )
        ]

    def run(self, call: Callable[[], Any]) -> Any:
        """Make a call with the blocks computed so."""
        self.declined, self.served = [], 0
        return Placing().run(call, self._placed)

    def compute(self, place: Place, inputs: Any) -> Any:
        """Compute a region; kinds that are equal are made once."""
        form, block = place.form, place.module
        assert isinstance(form, Learned)
        description = describe_place(place, self.plan, dtype=torch.float32, device="cpu")
        key = repr((description.form, description.module))
        weights = dict(block.named_parameters())
        if not self._exported and self._built is None:
            pending = iter(weights.values())
            twin = make_twin(description.module, lambda _shape, _dtype: next(pending))
            return leave(form, inputs, form.computed(twin, inputs))
        if key not in self._made:
            self._made[key] = self._graph(description, form)
        specs, call = self._made[key]
        values = [weights[spec.name] for spec in specs]
        return leave(form, inputs, tuple(call([*values, *inputs])))

    def _graph(self, description: RegionSpec, form: Learned) -> tuple[Any, Callable[[Any], Any]]:
        """The weights that a kind's graph takes, and its call."""
        if self._built is not None:
            loaded = self._built(description).loaded
            assert loaded is not None
            return loaded.weights, loaded.call
        program = export(RegionCode(description, form))
        return program.weights, lambda values: program.graph_module(*values)


class _Call:
    """Runs one place."""

    def __init__(self, regions: Regions, place: Place) -> None:
        self._regions, self._place = regions, place

    def __call__(self, *inputs: Any, options: Any, **_: Any) -> Any:
        self._regions.served += 1
        with using(options=options, arguments={}):
            return self._regions.compute(self._place, inputs)

    def decline(self, reason: Reason) -> None:
        self._regions.declined.append(reason)


def outside(record: Record) -> set[str]:
    """Why blocks were refused."""
    return {why["text"] for _, why in record["outside"]}


def error(result: Any, reference: Any) -> float:
    """The largest relative difference."""
    if isinstance(reference, (tuple, list)):
        return max(error(one, other) for one, other in zip(result, reference, strict=True))
    return float(relative(result, reference))
