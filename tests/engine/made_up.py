"""Made-up model families, for one test each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from warmgraph_backends.compilers.registry import backend_named
from warmgraph_backends.contract import WeightSpec
from warmgraph_backends.families import catalogue as registry
from warmgraph_backends.graphs.compiled_graph import CompiledGraph, Loaded, State, Status
from warmgraph_backends.plans.family import Family
from warmgraph_backends.plans.plan import Plan
from warmgraph_backends.runtime.planner import Planner
from warmgraph_backends.runtime.scope import Scope
from warmgraph_backends.worker import build

from .lab import Lab


def register(monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    for form in family.forms.values():
        monkeypatch.setitem(registry._FORMS, (form.family, form.name), form)
    for root in family.roots:
        monkeypatch.setitem(registry._BY_ROOT, root, family)


@contextlib.contextmanager
def compiled(
    lab: Lab, root: torch.nn.Module, plan: Plan
) -> Iterator[tuple[Scope, list[CompiledGraph]]]:
    """A scope over a model with the graph of each of its kinds built and loaded."""
    graphs, backend = lab.engine._graphs, backend_named("inductor")
    scope = Scope(root, root, Planner(lambda _: plan), plan, backend, lab.engine._shared)
    try:
        kinds = scope.describe(torch.device("cpu"), torch.float32)
        for graph in kinds:
            graphs._set(graph, built_here(graph))
        yield scope, kinds
    finally:
        lab.engine.close()


def built_here(graph: CompiledGraph) -> Status:
    """What a worker does, which would import a made-up family as a module of ours."""
    backend = graph.backend
    description = graph.description.to_dict()
    task = {"key": graph.key, "description": description, "backend": backend.name}
    payload, facts = build.run(task, measure=contextlib.nullcontext)
    weights = [WeightSpec(w[0], tuple(w[1]), w[2]) for w in facts["weights"]]
    return Status(State.READY, loaded=Loaded(backend.load(payload), weights, facts["work"]))


def new_lab(folder: Path) -> Lab:
    (folder / "user").mkdir()
    return Lab(folder)
