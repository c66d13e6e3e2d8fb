"""On a host of another version a prompt ends with the host's image, and the report says what is
off: each name that we ask for is taken away, and changed, one at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from warmgraph_backends.attaching.model import AttachedModel
from warmgraph_backends.cuda_graphs.replays import Replays
from warmgraph_backends.deepcache.run import DeepCacheOptions as CacheOptions
from warmgraph_backends.engine import WorkflowRef
from warmgraph_backends.errors import RequirementError, StrictError
from warmgraph_backends.host_api import present
from warmgraph_backends.host_api.needs import NEEDS, Feature, Need
from warmgraph_backends.runtime.bound import Placement
from warmgraph_backends.runtime.session import Session
from warmgraph_backends.stepcache.run import StepCacheOptions
from warmgraph_tools.inprocess import Host

from .blocks import check_blocks
from .controlled import Controlled
from .elsewhere import CALLED, GONE, block_classes, changes, check_one_more_argument, elsewhere
from .lab import TOLERANCE, Lab, relative
from .subject import reasons

CASES = [(need, change) for need in NEEDS for change in changes(need)]

#: What our package sees here is not what a wrapper of the host's ends in: it leaves such a step.
COMPARED = "comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel._forward"
LEFT = "another node puts its own function in place of the model's"


def _name(value: Any) -> str:
    return value.name.partition(":")[2] if isinstance(value, Need) else str(value)


def _hangs_on(need: Need, change: str) -> set[Feature]:
    """What is off: of a class that is gone, all that hangs on its attributes, too."""
    beneath = [other for other in NEEDS if other.name.startswith(f"{need.name}.")]
    lines = [need, *(beneath if change == GONE else [])]
    return {feature for line in lines for feature in line.features}


def _one_of_each() -> list[Any]:
    """All cases; where not all tests run, one for each way in which the same things go off."""
    seen, cases = set(), []
    for need, change in CASES:
        way = change if change in (GONE, CALLED) else "another name"
        alike = frozenset(_hangs_on(need, change)), way, need.name == COMPARED
        cases.append(pytest.param(need, change, marks=pytest.mark.slow if alike in seen else []))
        seen.add(alike)
    return cases


CASE = pytest.mark.parametrize(("need", "change"), CASES, ids=_name)


class Subject(NamedTuple):
    """A narrow model with all that can be compiled of a prompt, and the host's image."""

    host: Host
    model: Any
    vae: Any
    control: Any
    prompt: Any
    eager: torch.Tensor

    def sample(self, model: Any) -> torch.Tensor:
        size = {"width": 64, "height": 64, "batch": 1}
        image: torch.Tensor = self.host.sample(
            model, self.prompt, self.prompt, cfg=1.0, steps=1, **size
        )
        return image


@pytest.fixture(scope="module")
def subject(lab: Lab, host: Host) -> Subject:
    model, clip, vae = host.load("narrowxl")
    prompt = host.encode(clip, "a cat")
    name = host.model_file("controlnet", base="narrowxl")
    (control,) = host.node("ControlNetLoader", control_net_name=name)
    found = Subject(host, model, vae, control, prompt, torch.empty(0))
    return found._replace(eager=found.sample(model))


@pytest.fixture(scope="module")
def root(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store with all graphs of the narrow model."""
    copy = lab.copy_to(tmp_path_factory.mktemp("elsewhere") / "lab")
    copy.engine.close()
    return copy.root


@pytest.fixture
def start(root: Path) -> Iterator[Callable[[], Lab]]:
    """Set an engine up, as in a new server process."""
    made: list[Lab] = []

    def start() -> Lab:
        made.append(Lab(root))
        return made[-1]

    yield start
    for lab in made:
        lab.engine.close()


@CASE
def test_each_name_that_is_not_there_or_another_takes_what_hangs_on_it_along(
    host: Host, need: Need, change: str
) -> None:
    assert present.missing() == {}
    with elsewhere(need, change):
        assert set(present.missing()) == _hangs_on(need, change)


@pytest.mark.parametrize(("need", "change"), _one_of_each(), ids=_name)
def test_a_prompt_ends_with_the_hosts_image_and_the_report_says_what_is_off(
    subject: Subject,
    start: Callable[[], Lab],
    caplog: pytest.LogCaptureFixture,
    need: Need,
    change: str,
) -> None:
    caplog.set_level(logging.WARNING)
    with elsewhere(need, change):
        lab = start()
        off = lab.engine._shared.off
        assert set(off) == _hangs_on(need, change)
        compiled = lab.compiled(subject.model, when_missing="never")
        lab.settle()
        image = subject.sample(compiled)
        report = lab.engine.report(compiled)
        # Where everything is off, nothing else is of interest.
        told = [Feature.EVERYTHING] if Feature.EVERYTHING in off else list(off)
        for feature in told:
            CHECKS[feature](lab, subject, compiled, present.why_off(off, feature))
    warned = [r.getMessage() for r in caplog.records if r.name.startswith("warmgraph_backends")]
    left = (
        [f"Warmgraph: parts of SDXL run at normal speed: {LEFT}"] if need.name == COMPARED else []
    )
    assert warned == [*(present.why_off(off, feature) for feature in told), *left], "each once"
    if Feature.EVERYTHING in off:
        assert compiled is subject.model and torch.equal(image, subject.eager)
        assert report["notes"] == [present.why_off(off, Feature.EVERYTHING)]
    else:
        assert relative(image, subject.eager) < TOLERANCE
        if need.name != COMPARED:
            assert report["regions"]["compiled"] > 0, "the rest is as it was"
            return
        # Where the host lets nothing be put around it, the step is served from further out.
        served, total = change == GONE, report["regions"]["total"]
        assert reasons(report) == ({} if served else {LEFT: total})
        assert report["calls"] == {"compiled": total * served, "eager": 1}
        assert f"steps at normal speed: 1 ({LEFT})" in report["notes"]


# --- what is off ----------------------------------------------------------------------------------


def _everything(lab: Lab, subject: Subject, compiled: Any, why: str) -> None:
    engine = lab.engine
    for made, thing in (
        (engine.compile_vae(subject.vae, when_missing="never"), subject.vae),
        (engine.compile_controlnet(subject.control, when_missing="never"), subject.control),
        (engine.load_graphs(subject.model, "none", strict=False), subject.model),
    ):
        assert made is thing and engine.report(thing)["notes"], "nothing of it is touched"
    with pytest.raises(StrictError, match="off with this ComfyUI"):
        engine.load_graphs(subject.model, "none", strict=True)
    with pytest.raises(RequirementError, match="off with this ComfyUI"):
        engine.caches.deepcache(subject.model, CacheOptions())
    assert engine.warm_up(subject.model, [(64, 64)], [1])["notes"] == [why]


def _vaes(lab: Lab, subject: Subject, compiled: Any, why: str) -> None:
    assert lab.engine.compile_vae(subject.vae, when_missing="never") is subject.vae
    assert lab.engine.report(subject.vae)["notes"] == [why]
    with pytest.raises(StrictError, match="off with this ComfyUI"):
        lab.engine.load_vae_graphs(subject.vae, "none", strict=True)


def _controlnets(lab: Lab, subject: Subject, compiled: Any, why: str) -> None:
    assert lab.engine.compile_controlnet(subject.control, when_missing="never") is subject.control
    assert lab.engine.report(subject.control)["notes"] == [why]


def _deepcache(lab: Lab, subject: Subject, compiled: Any, why: str) -> None:
    with pytest.raises(RequirementError) as refused:
        lab.engine.caches.deepcache(subject.model, CacheOptions())
    assert str(refused.value) == why
    assert lab.engine.report(subject.model)["deepcache"] is None


def _stepcache(lab: Lab, subject: Subject, compiled: Any, why: str) -> None:
    with pytest.raises(RequirementError) as refused:
        lab.engine.caches.stepcache(subject.model, StepCacheOptions())
    assert str(refused.value) == why
    assert lab.engine.report(subject.model)["stepcache"] is None


def _warm_up(lab: Lab, subject: Subject, compiled: Any, why: str) -> None:
    assert why in lab.engine.warm_up(compiled, [(64, 64)], [1])["notes"]


def _workflows(lab: Lab, subject: Subject, compiled: Any, why: str) -> None:
    lab.workflow = WorkflowRef(path="a.json", user="default", id=None)
    assert lab.engine._hooks.current_workflow() is None
    assert why in lab.engine.report(compiled)["notes"]


def _everywhere(lab: Lab, subject: Subject, compiled: Any, why: str) -> None:
    def warned() -> list[str]:
        return [each["text"] for each in lab.engine.overview.snapshot()["warnings"]]

    assert not any(why in text for text in warned()), "nobody has asked for it"
    lab.settings.update({"compile_all": True})
    assert f"{why}. Put Compile Model before the sampler." in warned()
    lab.settings.update({"compile_all": False})


def _captured(lab: Lab, subject: Subject, compiled: Any, why: str) -> None:
    """What hangs on a GPU is decided when a session starts."""
    attached = _on_gpu(subject.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "cuda", "13.0")
        assert lab.replays(attached) is None and why in lab.lacks(attached)


def _weights_together(lab: Lab, subject: Subject, compiled: Any, why: str) -> None:
    assert why in lab.lacks(_on_gpu(subject.model))
    session = lab.engine._objects.carried(compiled)
    assert isinstance(session, Session)
    assert not session.scope._bound.weights.together


def _weights_ahead(lab: Lab, subject: Subject, compiled: Any, why: str) -> None:
    assert why in lab.lacks(_on_gpu(subject.model))


CHECKS: dict[Feature, Callable[[Lab, Subject, Any, Any], None]] = {
    Feature.EVERYTHING: _everything,
    Feature.CAPTURED_CALLS: _captured,
    Feature.WEIGHTS_TOGETHER: _weights_together,
    Feature.WEIGHTS_AHEAD: _weights_ahead,
    Feature.DEEPCACHE: _deepcache,
    Feature.STEP_CACHE: _stepcache,
    Feature.CONTROLNETS: _controlnets,
    Feature.VAES: _vaes,
    Feature.WARM_UP: _warm_up,
    Feature.WORKFLOWS: _workflows,
    Feature.EVERYWHERE: _everywhere,
}


def _on_gpu(model: Any) -> Any:
    """A model as it would be taken up on a GPU."""
    attached = AttachedModel(model)
    placement = Placement(torch.device("cuda"), torch.float16, {})
    attached.placement = lambda: placement  # type: ignore[method-assign]
    return attached


def test_on_this_host_nothing_is_off(
    subject: Subject, start: Callable[[], Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above find gone is there."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    lab = start()
    lab.workflow = WorkflowRef(path="a.json", user="default", id=None)
    assert lab.engine._shared.off == {} and lab.engine._hooks.current_workflow() == lab.workflow
    attached = _on_gpu(subject.model)
    assert isinstance(lab.replays(attached), Replays) and lab.lacks(attached) == []
    lab.workflow = None
    compiled = lab.compiled(subject.model, when_missing="never")
    session = lab.engine._objects.carried(compiled)
    assert session.scope._bound.weights.together and session.notes == []
    assert lab.engine.compile_controlnet(subject.control) is not subject.control


# --- one more argument ----------------------------------------------------------------------------


def test_a_newer_hosts_argument_leaves_its_blocks_of_a_unet_to_it_and_ends_no_prompt(
    subject: Subject, start: Callable[[], Lab]
) -> None:
    """What blocks of transformers and VAEs do then is in their own tests."""
    lab = start()

    def compiled() -> Any:
        model = lab.compiled(subject.model, when_missing="never")
        lab.settle()
        return model

    def check(model: Any) -> None:
        assert relative(subject.sample(model), subject.eager) < TOLERANCE

    model = compiled()
    check(model)
    session = lab.engine._objects.carried(model)
    assert check_blocks(session.scope, lambda: subject.sample(subject.model)) == set()
    classes = block_classes(session)
    assert len(classes) == 6
    check_one_more_argument(classes, compiled, check, lab.engine.report)
    assert lab.engine.report(compiled())["regions"]["eager"] == 0 and lab.jobs() == 0


def test_a_newer_hosts_argument_leaves_its_blocks_of_a_controlnet_to_it(
    lab: Lab, host: Host
) -> None:
    controlled = Controlled(lab, host)
    controlled.check(steps=1)
    jobs = lab.jobs()

    def compiled() -> Any:
        controlled.ours = lab.controlled(controlled.plain)
        return controlled.ours

    def check(_: Any) -> None:
        controlled.check(steps=1)

    session = lab.engine._objects.carried(controlled.ours)
    check_one_more_argument(block_classes(session), compiled, check, lab.engine.report)
    compiled()
    controlled.check(steps=1)
    assert lab.jobs() == jobs and controlled.report()["regions"]["eager"] == 0
