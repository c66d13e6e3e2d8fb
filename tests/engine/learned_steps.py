"""A made-up model's steps by what is learned of it, beside eager, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from warmgraph_backends.building.contract import BuildResult, Job
from warmgraph_backends.compilers.registry import backend_named
from warmgraph_backends.contract import WhenMissing
from warmgraph_backends.errors import BuildError, LearnError
from warmgraph_backends.events import Events
from warmgraph_backends.families.catalogue import code_of
from warmgraph_backends.graphs.compiled_graph import CompiledGraph, Loaded, State, Status
from warmgraph_backends.graphs.learned_models import LearnedModels
from warmgraph_backends.plans.plan import Plan
from warmgraph_backends.runtime.learner import Learner
from warmgraph_backends.runtime.pace import Pace, Times
from warmgraph_backends.runtime.scope import Scope
from warmgraph_backends.runtime.session import Session, SessionOptions
from warmgraph_backends.sessions.report import model_report
from warmgraph_backends.storing.canonical_json import canonical_json
from warmgraph_backends.storing.graph_file import compress_payload
from warmgraph_backends.storing.records import Records
from warmgraph_backends.worker.export import export

from .lab import Lab
from .learned import CALLS, arguments, error, learned_from
from .made_up import built_here

CPU = torch.device("cpu")


def exported_here(graph: CompiledGraph) -> Status:
    """What a worker exports, run operator by operator: nothing is compiled."""
    told = graph.description
    try:
        program = export(code_of(told))
    except BuildError as failure:
        return Status(State.FAILED, reason=failure.reason)

    def call(values: list[Any]) -> tuple[Any, ...]:
        given = list(values)
        values.clear()
        return tuple(program.graph_module(*given))

    return Status(State.READY, loaded=Loaded(call, program.weights, program.work))


class Here:
    """Learns of a made-up model in this process, for no worker can import it; else a builder."""

    def __init__(self, make: Callable[[], torch.nn.Module]) -> None:
        self._make = make
        self.jobs = 0
        self._held: list[Callable[[], None]] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is learned comes when this ends."""
        self._held = []
        yield
        held, self._held = self._held, None
        for each in held:
            each()

    def submit(self, job: Job) -> Future[BuildResult]:
        self.jobs += 1
        future: Future[BuildResult] = Future()
        if self._held is None:
            self._learn(job, future)
        else:
            self._held.append(partial(self._learn, job, future))
        return future

    def _learn(self, job: Job, future: Future[BuildResult]) -> None:
        try:
            record = learned_from(self._make, job.task["watched"])
        except LearnError as failure:
            future.set_exception(BuildError(failure.reason))
        else:
            payload = compress_payload(canonical_json(record).encode())
            future.set_result(BuildResult(job.key, payload, {}, 0.0))


class Steps:
    """A made-up model, and its steps beside eager."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        make: Callable[[], torch.nn.Module],
        built: Callable[[CompiledGraph], Status] = built_here,
    ) -> None:
        """Set up.

        Args:
            built: gives what a worker's build does.
        """
        torch.manual_seed(3)
        self._built = built
        self.lab, self.root = lab, make().eval().requires_grad_(False)
        self.here = Here(make)
        records = Records(folder / "records", lab.signer)
        lessons = LearnedModels(records, self.here, Events())  # type: ignore[arg-type]
        shared = replace(lab.engine._shared, lessons=lessons)
        model = SimpleNamespace(model_config=SimpleNamespace(unet_config={}))
        self.learner = Learner(self.root, model, lessons, lambda: True, may_ask=True)
        self.learner.look(())
        backend = backend_named("inductor")
        self.scope = Scope(self.root, self.root, self.learner, Plan(), backend, shared)
        options = SessionOptions(WhenMissing.BACKGROUND, "")
        self.session = Session("1", "Model", backend, options, self.scope, Pace(Times()))
        self.scope.describe(CPU, torch.float32)

    def make(self, sizes: tuple[int, ...] = CALLS[0], steps: int = 1, **options: Any) -> Any:
        """A run; the result of its last step."""
        return self.make_with(arguments(*sizes), steps, **options)

    def make_with(self, given: Sequence[torch.Tensor], steps: int = 1, /, **options: Any) -> Any:
        """As `make`, called with these."""
        scope, own = self.scope, type(self.root).forward
        if self.learner.has_news:
            scope.describe(CPU, torch.float32)
        for graph in scope.graphs:
            if graph.state is State.MISSING:
                self.lab.engine._graphs._set(graph, self._built(graph))
        self.session.begin_run()
        scope.begin_run()
        kwargs = {"transformer_options": dict(options)}
        for _ in range(steps):
            result = self.session.step(partial(own, self.root), given, kwargs)
        scope.end_run()
        self.session.end_run()
        return result

    def run(self, sizes: tuple[int, ...] = CALLS[0], **options: Any) -> tuple[int, float]:
        """As `make`; calls that graphs served, and how far it is from eager."""
        before = self.scope.compiled_calls
        twin = deepcopy(self.root)  # some keep something from one call to the next
        reference = type(twin).forward(twin, *arguments(*sizes), transformer_options=dict(options))
        made = self.make(sizes, **options)
        return self.scope.compiled_calls - before, error(made, reference)

    def served(self, sizes: tuple[int, ...] = CALLS[0], **options: Any) -> tuple[int, float]:
        """As `run`, of a call whose like was compared: ComfyUI's code made that."""
        assert self.run(sizes, **options)[1] < 1e-5
        return self.run(sizes, **options)

    def reasons(self) -> set[str]:
        return {reason.cause.key for _, reason in self.scope.eager_places()}

    def told(self) -> dict[str, int]:
        """How parts stand, as a report tells: those that there are."""
        parts = self.session.parts()
        found = {**parts._asdict(), "eager": len(parts.eager)}
        return {name: count for name, count in found.items() if count}

    def lines(self) -> list[str]:
        """What the node shows."""
        report = model_report(self.session, self.lab.engine._builder, None)
        return [each["text"] for each in report["lines"]]
