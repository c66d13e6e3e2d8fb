"""Models without regions: nothing of them is compiled, and their whole steps may be captured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from warmgraph_backends.attaching.model import AttachedModel
from warmgraph_backends.code.watch import Watch
from warmgraph_backends.compilers.registry import backend_named
from warmgraph_backends.contract import WhenMissing
from warmgraph_backends.cuda_graphs.signatures import run_steps
from warmgraph_backends.families.catalogue import may_be_captured, plan_model
from warmgraph_backends.plans.plan import Plan
from warmgraph_backends.runtime.pace import Pace, Times
from warmgraph_backends.runtime.placing import unmarked
from warmgraph_backends.runtime.planner import Planner
from warmgraph_backends.runtime.scope import Scope
from warmgraph_backends.runtime.session import Session, SessionOptions
from warmgraph_backends.runtime.wiring import Wiring, replaced_function
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.small_kinds import WHOLE

from .lab import Lab, left_behind

# The host puts no wrappers around these models' own forward.
NOT_WRAPPED = ("sd3", "omnigen", "ernie")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """An engine that builds nothing."""
    made = Lab(tmp_path_factory.mktemp("lab"))
    yield made
    made.engine.close()


def _sampled(host: Host, model: Any, kind: str) -> torch.Tensor:
    result: torch.Tensor = host.sample(
        model,
        transformers.conditioning(kind, 13),
        transformers.conditioning(kind, 7, seed=2),
        latent=transformers.latent(kind, 8, 8),
        steps=2,
        cfg=3.0,
        scheduler="simple",
    )
    assert result.isfinite().all()
    return result


class _Counted(Session):
    """Counts the calls that come through it, and notes what each says of its run."""

    count = 0
    steps: int | None = None

    def step(self, host: Any, args: Any, kwargs: Any, **others: Any) -> Any:
        self.count += 1
        self.steps = run_steps(args, kwargs)
        return super().step(host, args, kwargs, **others)


def _attached(lab: Lab, model: Any) -> tuple[Any, _Counted]:
    """A model with a session as it has one on a GPU, without captured calls."""
    attached, eager = AttachedModel(model), backend_named("eager")
    assert attached.root is not None
    scope = Scope(
        attached.root, attached.holder, Planner(lambda _: Plan()), Plan(), eager, lab.engine._shared
    )
    options = SessionOptions(WhenMissing.NEVER, "")
    session = _Counted("model-0", attached.name, eager, options, scope, Pace(Times()))
    session.describe(attached.placement().device, attached.placement().dtype)
    attached.attach(session, lab.engine._runs)
    return attached.value, session


@pytest.mark.parametrize("kind", WHOLE)
def test_without_a_gpu_it_runs_as_the_hosts_and_the_report_says_so(
    lab: Lab, host: Host, kind: str
) -> None:
    model = transformers.load(kind)
    root = model.model.diffusion_model
    assert Wiring(root).foreign() is None and replaced_function(root, Watch()) is None
    jobs = lab.jobs()
    lab.settings.update({"learn_models": False})
    try:
        ours = lab.compiled(model)
    finally:
        lab.settings.update({"learn_models": True})
    assert torch.equal(_sampled(host, ours, kind), _sampled(host, model, kind))
    report = lab.engine.report(ours)
    assert lab.jobs() == jobs and report["regions"]["total"] == 0 and not report["kinds"]
    (note,) = report["notes"]
    assert "has no regions, so nothing of it is compiled" in note
    assert note.endswith("it runs at normal speed")


def test_a_forward_that_reads_is_not_captured() -> None:
    """Its blocks are those of one that may be."""
    root, without = (
        transformers.make(kind).diffusion_model for kind in ("hunyuan_flow", "hunyuan")
    )
    assert not may_be_captured(root) and may_be_captured(without)
    plans = plan_model(root), plan_model(without)
    assert isinstance(plans[0], Plan) and isinstance(plans[1], Plan)
    assert [place.name for place in plans[0].places] == [place.name for place in plans[1].places]


@pytest.mark.parametrize("kind", [*NOT_WRAPPED, "hunyuan"])
def test_each_call_comes_through_once_and_nothing_stays_behind(
    lab: Lab, host: Host, kind: str
) -> None:
    model = transformers.load(kind)
    plain = _sampled(host, model, kind)
    ours, session = _attached(lab, model)
    assert torch.equal(_sampled(host, ours, kind), plain)
    assert session.count == 4, "two steps, two prompts of unequal length"
    assert session.steps == 2
    assert left_behind(model.model.diffusion_model) == [] and session.eager_calls == {}
    assert torch.equal(_sampled(host, ours.clone(), kind), plain) and session.count == 8
    assert torch.equal(_sampled(host, model, kind), plain) and session.count == 8


@pytest.mark.parametrize("kind", NOT_WRAPPED)
def test_another_nodes_forward_is_called_and_named(lab: Lab, host: Host, kind: str) -> None:
    ours, session = _attached(lab, transformers.load(kind))
    root = ours.model.diffusion_model
    calls: list[int] = []

    def zeros(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        calls.append(len(calls))
        return torch.zeros_like(x)

    root.forward = zeros
    try:
        _sampled(host, ours, kind)
        assert root.forward is zeros and len(calls) == session.count == 4
        (reason,) = session.eager_calls
        pack = __name__.partition(".")[0]
        assert reason == f"{pack} puts its own forward in place of the model's"
    finally:
        del root.forward
    _sampled(host, ours, kind)
    assert len(calls) == 4 and left_behind(root) == []


def test_what_such_a_model_raises_passes_and_nothing_stays_behind(lab: Lab, host: Host) -> None:
    ours, session = _attached(lab, transformers.load("sd3"))
    root = ours.model.diffusion_model
    layer = root.final_layer
    layer.forward = _broken
    try:
        with pytest.raises(ValueError, match="broken"):
            _sampled(host, ours, "sd3")
    finally:
        del layer.forward
    assert left_behind(root) == [] and session.count == 1


def _broken(*_: Any, **__: Any) -> torch.Tensor:
    raise ValueError("broken")


def test_attributes_are_put_back() -> None:
    module = torch.nn.Linear(2, 2)
    module.kept = before = torch.zeros(1)
    with pytest.raises(ValueError, match="broken"), unmarked(module):
        module.kept, module.more = torch.ones(1), torch.ones(1)
        _broken()
    assert module.kept is before and not hasattr(module, "more")
    assert module(torch.zeros(1, 2)).shape == (1, 2)
