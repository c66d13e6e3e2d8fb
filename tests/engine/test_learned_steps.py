"""Steps of made-up models that nobody described: watched, learned, compared, and watched again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warmgraph_backends.building.builder import BuildResult, Job
from warmgraph_backends.compilers.registry import backend_named
from warmgraph_backends.errors import BuildError, LearnError
from warmgraph_backends.events import Events
from warmgraph_backends.graphs.graph import State
from warmgraph_backends.graphs.lessons import MOST_STEPS, Lessons
from warmgraph_backends.plans.plan import Plan
from warmgraph_backends.runtime.scope import Scope
from warmgraph_backends.runtime.study import Study
from warmgraph_backends.storing.canonical_json import canonical_json
from warmgraph_backends.storing.graph_file import compress_payload
from warmgraph_backends.storing.records import Records
from warmgraph_tools.inprocess import Host

from . import learned_models
from .lab import Lab
from .learned import CALLS, arguments, error, learned_from
from .made_up import built_here

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(host: Host) -> Iterator[Any]:
    yield learned_models.load(learned_models.SOURCE + SOURCE)
    learned_models.unload()


#: What a comparison of blocks cannot see.
SOURCE = """

class MarksBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        vec.note = 2.0
        return x + self.mix(x, vec, transformer_options)


class Marks(Model):
    block = MarksBlock

    def run(self, h, vec, options):
        return super().run(h, vec, options) * getattr(vec, "note", 1.0)


class Looks(Model):
    def run(self, h, vec, options):
        h = super().run(h, vec, options)
        forward = vars(self.blocks[0]).get("forward")
        return h * (1.01 if "bound" in getattr(forward, "__qualname__", "") else 1.0)
"""


class Here:
    """Learns of a made-up model in this process, for no worker can import it; else a builder."""

    def __init__(self, make: Callable[[], torch.nn.Module]) -> None:
        self._make = make
        self.jobs = 0

    def submit(self, job: Job) -> Future[BuildResult]:
        self.jobs += 1
        future: Future[BuildResult] = Future()
        try:
            record = learned_from(self._make, job.task["watched"])
        except LearnError as failure:
            future.set_exception(BuildError(failure.reason))
        else:
            payload = compress_payload(canonical_json(record).encode())
            future.set_result(BuildResult(job.key, payload, {}, 0.0))
        return future


class Steps:
    """A made-up model, and its steps beside eager."""

    def __init__(self, lab: Lab, folder: Path, make: Callable[[], torch.nn.Module]) -> None:
        torch.manual_seed(3)
        self.lab, self.root = lab, make().eval().requires_grad_(False)
        self.here = Here(make)
        records = Records(folder / "records", lab.signer)
        lessons = Lessons(records, self.here, Events())  # type: ignore[arg-type]
        shared = replace(lab.engine._shared, lessons=lessons)
        model = SimpleNamespace(model_config=SimpleNamespace(unet_config={}))
        self.study = Study(self.root, model, lessons, lambda: True, may_ask=True)
        self.study.look(())
        self.scope = Scope(
            self.root,
            self.root,
            self.study.plan,
            Plan(),
            backend_named("inductor"),
            shared,
            study=self.study,
        )
        self.scope.describe(CPU, torch.float32)

    def run(self, sizes: tuple[int, ...] = CALLS[0], **options: Any) -> tuple[int, float]:
        """A run of one step: calls that graphs served, and how far it is from eager."""
        scope, own = self.scope, type(self.root).forward
        if self.study.has_news:
            scope.describe(CPU, torch.float32)
        for graph in scope.graphs:
            if graph.state is State.MISSING:
                self.lab.engine._graphs._set(graph, built_here(graph))
        scope.begin_run()
        before = scope.compiled_calls
        given = arguments(*sizes)
        twin = deepcopy(self.root)  # some keep something from one call to the next
        reference = own(twin, *given, transformer_options=dict(options))
        kwargs = {"transformer_options": dict(options)}
        made = scope.call(lambda *a, **k: own(self.root, *a, **k), given, kwargs)
        scope.end_run()
        return scope.compiled_calls - before, error(made.result, reference)

    def reasons(self) -> set[str]:
        return {reason.cause.key for _, reason in self.scope.eager_places()}


@pytest.fixture(scope="module")
def lab(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("steps"))
    yield lab
    lab.engine.close()


@pytest.fixture
def steps(models: Any, lab: Lab, tmp_path: Path) -> Iterator[Callable[[str], Steps]]:
    with torch.inference_mode():
        yield lambda name: Steps(lab, tmp_path, getattr(models, name))


@pytest.mark.parametrize("name", ["Model", "InPlace", "Indexed"])
def test_what_was_learned_serves_calls_of_all_sizes(
    steps: Callable[[str], Steps], name: str
) -> None:
    made = steps(name)
    assert made.run() == (0, 0.0)
    for sizes in CALLS:
        calls, far = made.run(sizes)
        assert calls == 2 and far < 1e-5
    assert made.here.jobs == 1 and made.reasons() == set()


def test_a_way_serves_once_it_ran_in_a_whole_step(steps: Callable[[str], Steps]) -> None:
    """The first call of it is the host's, and the next one compared."""
    made = steps("Sizes")
    assert made.run() == (0, 0.0)
    found = [made.run(sizes) for sizes in (CALLS[0], CALLS[4], CALLS[4], CALLS[0], CALLS[4])]
    assert [calls for calls, _ in found] == [2, 0, 2, 2, 2]
    assert max(far for _, far in found) < 1e-5
    assert made.here.jobs == 1 and made.reasons() == set()


@pytest.mark.parametrize(
    ("name", "key"),
    [("Counts", "learned_settings"), ("Random", "learned_random"), ("Reads", "learned_reads_data")],
)
def test_a_model_of_which_nothing_is_learned_is_the_hosts_and_is_watched_once(
    steps: Callable[[str], Steps], name: str, key: str
) -> None:
    """Also by the next server: it is kept."""
    made = steps(name)
    made.run()
    made.run(CALLS[1])
    made.run()
    assert made.here.jobs == 1 and made.scope.compiled_calls == 0
    [reason] = {reason for _, reason in made.scope.eager_places()}
    assert key in {reason.cause.key, getattr(reason.cause.values.get("why"), "key", "")}
    again = steps(name)
    again.run()
    assert again.here.jobs == 0


def test_a_call_that_differs_is_watched_again_a_few_times(
    steps: Callable[[str], Steps],
) -> None:
    made = steps("Option")
    made.run()
    assert made.run()[0] == 2
    made.run(strength=2.0)  # declined
    assert made.here.jobs == 1
    made.run(strength=2.0)  # watched
    assert made.here.jobs == 2
    for options in ({}, {"strength": 2.0}, {}):
        calls, far = made.run(CALLS[1], **options)
        assert calls == 2 and far < 1e-5
    for strength in (3.0, 4.0, 5.0, 6.0, 7.0, 8.0):
        for _ in range(2):
            assert made.run(strength=strength)[1] < 1e-5
    assert made.here.jobs == MOST_STEPS
    assert made.run()[0] == 2
    assert steps("Option").run()[0] == 2  # as the next server finds it
    assert steps("Option").here.jobs == 0


def test_a_number_that_differs_from_step_to_step_is_no_other_way(
    steps: Callable[[str], Steps], models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = steps("Number")
    made.run()
    assert made.run()[0] == 2
    for number in (0.6, 0.7, 0.8, 0.9, 1.0, 1.1):
        monkeypatch.setattr(models, "STATE", [number])
        for _ in range(2):
            assert made.run() == (0, 0.0)
    assert made.here.jobs == MOST_STEPS and len(made.scope.plan.places) == 2
    monkeypatch.setattr(models, "STATE", [0.5])
    assert made.run()[0] == 2


def test_what_only_a_whole_step_shows_is_dropped(
    steps: Callable[[str], Steps], log: pytest.LogCaptureFixture
) -> None:
    """A root that tells whose forward its blocks have: each block is right by itself."""
    made = steps("Looks")
    for sizes in CALLS:
        assert made.run(sizes)[1] == 0.0
    assert made.reasons() == {"learned_dropped"} and made.here.jobs == 1
    assert "differs from ComfyUI's result" in log.text
    assert steps("Looks").run()[1] < 1e-5  # of another process, which compares it anew


def test_a_mark_on_a_tensor_is_seen_somewhere(steps: Callable[[str], Steps]) -> None:
    made = steps("Marks")
    for sizes in CALLS:
        assert made.run(sizes)[1] == 0.0
    assert made.scope.compiled_calls == 0 or made.reasons() == {"learned_dropped"}
