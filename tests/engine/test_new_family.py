"""A region plan for a made-up family, written as ARCHITECTURE.md says, and compiled."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.compilers.registry import backend_named
from warmgraph_backends.contract import InputSpec, Symbol, WeightSpec
from warmgraph_backends.families import catalogue as registry
from warmgraph_backends.families.plan import Form, Place, Plan, dispatch_one, unary
from warmgraph_backends.runtime.graph import State
from warmgraph_backends.runtime.scope import Scope
from warmgraph_backends.worker import build
from warmgraph_tools.inprocess import Host

from .lab import Lab, relative


class Gate(torch.nn.Module):
    """A block of the made-up model: `[rows, C]` -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width)
        self.slope = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sigmoid(self.inner(x)) * self.slope


class Tower(torch.nn.Module):
    """The made-up model: three gates and an end that no form knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = torch.nn.ModuleList([Gate(8), Gate(8), Gate(16)])
        self.widen = torch.nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gates[2](self.widen(self.gates[1](self.gates[0](x))))


class GateForm(Form):
    """Gate: `x [rows, C]` -> the same."""

    family = "tower"
    name = "gate"

    def label(self, module: Any) -> str:
        return f"Gate {module.inner.in_features}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("rows", module.inner.in_features)),)


GATE = GateForm()


def plan_tower(model: Any) -> Plan:
    plan = Plan(symbols={"rows": Symbol("rows", 1, 4096, 33)})
    for name, layer in model.named_modules():
        if type(layer) is Gate:
            plan.dispatches.append(dispatch_one(Place(name, layer, GATE), unary))
    plan.outside.append(("widen", "one product of matrices is nothing to fuse"))
    return plan


def test_a_made_up_family_runs_compiled(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._FORMS, ("tower", "gate"), GATE)
    monkeypatch.setitem(registry._PLANS, f"{__name__}:Tower", plan_tower)
    torch.manual_seed(0)
    tower = Tower().requires_grad_(False)
    plan = registry.plan_model(tower)
    assert isinstance(plan, Plan) and len(plan.places) == 3

    (tmp_path / "user").mkdir()
    lab = Lab(tmp_path)
    graphs, backend = lab.engine._graphs, backend_named("inductor")
    scope = Scope(tower, tower, lambda: plan, plan, backend, lab.engine._shared)
    try:
        kinds = scope.describe(torch.device("cpu"), torch.float32)
        assert [graph.description.label for graph in kinds] == ["Gate 8", "Gate 16"]
        for graph in kinds:  # what a worker does, which would import the family as a module of ours
            task = {
                "key": graph.key,
                "description": graph.description.to_dict(),
                "backend": backend.name,
            }
            payload, facts = build.run(task, measure=contextlib.nullcontext)
            graph.call = backend.load(payload)
            graph.weights = [WeightSpec(w[0], tuple(w[1]), w[2]) for w in facts["weights"]]
            graph.work = facts["work"]
            graphs._set(graph, State.READY)
        with torch.inference_mode():
            for rows in (1, 2, 33, 500):
                x = torch.randn(rows, 8)
                calls = scope.compiled_calls
                result = scope.call(tower, (x,), {})
                assert relative(result, tower(x)) < 1e-6
                assert scope.compiled_calls == calls + 3
        assert scope.eager_places() == plan.outside
    finally:
        lab.engine.close()
