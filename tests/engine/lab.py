"""An engine with folders of its own, and a probe that compares each UNet call with the host's."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from warmgraph_backends.compilers.registry import backend_named
from warmgraph_backends.contract import RegionSpec
from warmgraph_backends.debugging import OFF, Debugging
from warmgraph_backends.engine import Engine, Hooks, Paths, WorkflowRef
from warmgraph_backends.graphs.compiled_graph import CompiledGraph
from warmgraph_backends.host_api.layers import bound_forward
from warmgraph_backends.sessions.settings import Settings
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.target import keys
from warmgraph_tools import compiler_facts
from warmgraph_tools.inprocess import Host
from warmgraph_tools.kept_graphs import keeping

TOLERANCE = 1e-4
"""Relative L2 per UNet call in fp32: the bound; other orders of sums stay below 1e-5."""

_STORE, _PRIVATE = "models/compiled_graphs", "user/__warmgraph"
_PATIENCE_S = 1200


class Lab:
    """One engine with folders of its own, and a workflow that a test may set."""

    def __init__(self, root: Path, debugging: Debugging = OFF) -> None:
        self.root = root
        self.store = root / _STORE
        self.workflow: WorkflowRef | None = None
        #: Of the graphs of the shared lab's first prompt.
        self.first_keys: Sequence[str] = ()
        self.cancelled: Callable[[], None] = lambda: None
        self.workflows = root / "user" / "default" / "workflows"
        private = root / _PRIVATE
        for folder in (self.workflows, private):
            folder.mkdir(parents=True, exist_ok=True)
        compiler_facts.share(private)
        self.settings = Settings(private)
        # Its worker starts once; another test process of the run has one, too.
        self.settings.update({"idle_s": 600, "workers": 1})
        self.engine = Engine(
            paths=Paths(store=self.store, private=private, workflows=lambda user: self.workflows),
            settings=self.settings,
            hooks=Hooks(
                current_workflow=lambda: self.workflow,
                on_change=lambda: None,
                check_cancelled=lambda: self.cancelled(),
            ),
            debugging=debugging,
        )
        self.settle()  # it has been tried whether the store can be written: no file comes or goes

    def copy_to(self, root: Path, debugging: Debugging = OFF) -> Lab:
        """Another engine, as a new server process has it, over a copy of store and signing key.

        Not of what other engines over these folders write while they build.
        """
        passing = shutil.ignore_patterns("spool", "*.claim", "*.tmp", "*.trial")
        for part in (_STORE, _PRIVATE):
            shutil.copytree(self.root / part, root / part, ignore=passing)
        copy = Lab(root, debugging)
        copy.first_keys = self.first_keys
        return copy

    def compiled(self, model: Any, **options: Any) -> Any:
        return self.engine.compile_model(model, **{"when_missing": "wait", **options})

    def controlled(self, control: Any, **options: Any) -> Any:
        return self.engine.compile_controlnet(control, **{"when_missing": "wait", **options})

    def counts(self, model: Any) -> tuple[int, int, int]:
        """(builds, loads, eager regions) of a compiled model."""
        report = self.engine.report(model)
        return report["builds"], report["loads"], report["regions"]["eager"]

    def build_only(self, session: Any, labels: Collection[str]) -> list[Any]:
        """Build or load some kinds of a session that asked for no builds; returns their graphs."""
        graphs = [k.graph for k in session.scope.kinds if k.label in labels and k.graph is not None]
        assert len(graphs) == len(labels)
        self.engine._graphs.settle()
        self.engine._graphs.request(graphs, [], build=True)
        self.engine._prompts.wait("model", graphs, self.engine._builder, None)
        assert [graph.reason for graph in graphs] == [None] * len(labels)
        return graphs

    def graph(self, description: RegionSpec, *, build: bool) -> CompiledGraph:
        """Load the graph of a kind that is at no place, or build it."""
        backend = backend_named("inductor")
        engine, facts = self.engine, keys.target(description.device, backend)
        graph = engine._graphs.graph(description, backend, facts)
        engine._graphs.request([graph], [], build=build)
        self.settle()
        engine._prompts.wait("the graph", [graph], engine._builder, None)
        return graph

    def builds(self) -> int:
        """Graphs that this engine's workers have built."""
        return self.engine._graphs.builds

    def jobs(self) -> int:
        """Builds that this engine has asked for, whatever became of them."""
        return self.engine._builder._number  # progress counts from each idle moment anew

    @property
    def signer(self) -> Signer:
        """What signs this engine's files."""
        return Signer(self.root / _PRIVATE)

    @property
    def hello(self) -> dict[str, Any]:
        """What workers are told at their start."""
        builder = self.engine._builder
        return builder._hello

    def is_all_filed(self) -> bool:
        """Tell whether nothing is kept that is to be filed in workflows' folders later."""
        links = self.engine._workflow_links
        return not links._records

    def lacks(self, attached: Any) -> list[str]:
        """What the host has not of what sessions need, in words."""
        starter = self.engine._starter
        return starter._lacks(attached)

    def replays(self, attached: Any) -> Any:
        """What a session would capture calls with, None for nothing."""
        starter = self.engine._starter
        return starter._replays(attached)

    def compared(self, attached: Any) -> int:
        """How many comparisons with eager a model's calls made."""
        account = attached.get_attachment("warmgraph").scope.account
        count: int = account.compared
        return count

    def compare_anew(self) -> None:
        """As in a new process: each graph is compared at its next call."""
        for verdicts in list(self.engine._shared._verdicts.values()):
            verdicts.compare_anew()

    def is_settled(self, model: Any) -> bool:
        """Tell whether no graph of a compiled model is on its way."""
        states = {kind["state"] for kind in self.engine.report(model)["kinds"]}
        return not states & {"loading", "building"}

    def settle_all(self, model: Any) -> None:
        """Wait until no graph of a compiled model is on its way, second ones among them."""

        def states() -> set[str]:
            kinds = self.engine.report(model)["kinds"]
            return {each for k in kinds for each in (k["state"], *k["variants"].values())}

        self.wait_until(lambda: not states() & {"loading", "building"})
        self.settle()

    def settle(self) -> None:
        """Wait until all that was asked for was looked for on disk and filed."""
        self.engine._graphs.settle()

    @contextmanager
    def held(self) -> Iterator[threading.Event]:
        """Keep the loader from making any graph ready before the event is set."""
        gate = threading.Event()
        self.engine._graphs.when_loaded(lambda: gate.wait(_PATIENCE_S))
        try:
            yield gate
        finally:
            gate.set()

    def wait_until(self, arrived: Callable[[], bool]) -> None:
        """Wait for workers, whose time nobody can tell."""
        end = time.monotonic() + _PATIENCE_S
        while not arrived():
            assert time.monotonic() < end, "nothing arrived"
            time.sleep(0.05)


def lab_of_its_own(name: str, folders: pytest.TempPathFactory) -> Iterator[Lab]:
    """An engine for one module's tests, with the graphs that earlier runs kept."""
    root = folders.mktemp(name, numbered=False)
    (root / "user").mkdir(parents=True, exist_ok=True)
    with keeping(root):
        lab = Lab(root)
        yield lab
        lab.engine.close()


def call_instead(graph: Any, call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Have a ready graph be called by this from now on; returns what it was called by."""
    loaded = graph.status.loaded
    graph.status = graph.status._replace(loaded=loaded._replace(call=call))
    before: Callable[[list[Any]], Any] = loaded.call
    return before


class Call(NamedTuple):
    """One UNet call: its input's shape, the text's length, how far the result is from eager's."""

    shape: tuple[int, ...]
    tokens: int
    error: float
    is_equal: bool


class Probe:
    """Sits outermost around a patcher's UNet calls and gives their inputs to the host's code too.

    Attach it before anything else, so that ours runs inside it.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_off = False
        #: How far a result is from eager's.
        self.distance = relative

    def attach(self, patcher: Any) -> Any:
        """Return a clone of a patcher with this probe around its calls; where the host lets nothing
        be put around those of the diffusion model, around those of what holds it.
        """
        from comfy.patcher_extension import WrappersMP

        clone = patcher.clone()
        wraps = bound_forward(clone.model.diffusion_model) is not None
        kind = WrappersMP.DIFFUSION_MODEL if wraps else WrappersMP.APPLY_MODEL
        clone.add_wrapper_with_key(kind, "warmgraph.probe", self._around)
        return clone

    def _around(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        owner = executor.class_obj
        assert left_behind(getattr(owner, "diffusion_model", owner)) == []
        if self.is_off:
            return executor(*args, **kwargs)
        eager = executor.original(*_copied(args), **_copied(kwargs))
        result = executor(*args, **kwargs)
        if hasattr(owner, "diffusion_model"):
            context = args[3] if len(args) > 3 else kwargs["c_crossattn"]
        else:
            context = args[2] if len(args) > 2 else kwargs["context"]
        ours, theirs, given = map(_parts, (result, eager, args[0]))
        pairs = list(zip(ours, theirs, strict=True))
        error = max(self.distance(a, b) for a, b in pairs if b.numel())
        equal = all(torch.equal(a, b) for a, b in pairs)
        self.calls.append(Call(tuple(given[0].shape), context.shape[1], error, equal))
        return result


def _parts(value: Any) -> list[torch.Tensor]:
    """The tensors of an input or a result: one, or one for each sort of latent."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


class Once:
    """Samples once for the same numbers and names, anew for all else."""

    def __init__(self, sample: Callable[..., torch.Tensor]) -> None:
        self._sample = sample
        self._images: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, **sampling: Any) -> torch.Tensor:
        if not all(type(value) in (int, float, str) for value in sampling.values()):
            return self._sample(**sampling)
        key = tuple(sorted(sampling.items()))
        if key not in self._images:
            self._images[key] = self._sample(**sampling)
        return self._images[key]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||."""
    return float((a - b).norm() / b.norm())


def assert_same_calls(results: Sequence[torch.Tensor], calls: int) -> None:
    """See that in each of so many of a probe's calls ours gave the same as eager, in its order.

    Args:
        results: of all that others' code gave: by eager and by ours, in turns.
    """
    each = len(results) // (2 * calls)
    assert each and len(results) == 2 * calls * each
    for start in range(0, len(results), 2 * each):
        eager, ours = results[start : start + each], results[start + each : start + 2 * each]
        assert [one.shape for one in ours] == [one.shape for one in eager]
        far = [relative(a, b) for a, b in zip(ours, eager, strict=True)]
        assert max(far) < 0.01, far


def sampled(host: Host, models: Sequence[Any], prompt: Any, latent: Any) -> list[torch.Tensor]:
    """Two steps by each model, of the same noise."""
    return [host.sample(each, prompt, prompt, latent=latent, steps=2, cfg=1.0) for each in models]


def left_behind(module: torch.nn.Module) -> list[str]:
    """Names of the modules whose instance has a `forward` of its own."""
    return [name for name, part in module.named_modules() if "forward" in part.__dict__]


def _copied(value: Any) -> Any:
    """A copy of tensors and containers, for models pop from lists and write into tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return {k: _copied(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(v) for v in value)
    return value
