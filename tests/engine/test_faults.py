"""Whatever of ours fails, a prompt does not: the host's code runs, one warning has the trace."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .controlled import Controlled
from .lab import TOLERANCE, Lab, left_behind, relative
from .rows import some_rows
from .subject import Subject, reasons

PACKAGE = "warmgraph_backends"

#: What of ours breaks, as module and name; each is called in a run.
BROKEN = {
    "looking for other nodes' code": ("runtime.foreign", "Foreign.look_again"),
    "asking whether the model is the same": ("runtime.scope", "Scope.is_stale"),
    "beginning a run": ("runtime.scope", "Scope.begin_run"),
    "beginning a step": ("weights.fetching", "ModelWeights.begin_step"),
    "making forwards": ("runtime.dispatcher", "Dispatcher.refresh"),
    "choosing forwards": ("runtime.dispatcher", "Dispatcher._region"),
    "reading the call": ("runtime.scope", "read_call"),
    "a region": ("runtime.input_guard", "InputGuard._problem"),
    "weights": ("weights.fetching", "RegionWeights._gather"),
    "the host's weights": ("weights.casting", "Resident.fetch"),
    "verifying": ("runtime.verifier", "Verifier.covers"),
    "comparing": ("runtime.verifier", "judge"),
    "remembering a comparison": ("runtime.verifier", "Verifier._equals"),
    "finding a model's session": ("attaching.evaluation", "_evaluation"),
    "looking at the model's own call": ("attaching.evaluation", "_route"),
    "noting what ran": ("runtime.session", "Session.end_run"),
    "ending a run": ("runtime.scope", "Scope.end_run"),
    "saying why": ("runtime.scope", "Scope.eager_places"),
}


class _BrokenError(Exception):
    """What no code of ours expects."""


@pytest.fixture(scope="module")
def xl(lab: Lab, host: Host) -> Subject:
    return Subject(lab, host, "narrowxl")


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Any:
    """`warned()`: the warnings of ours, each with whether its trace is there."""
    caplog.set_level(logging.WARNING)

    def warned() -> list[tuple[str, bool]]:
        ours = (r for r in caplog.records if r.name.startswith("warmgraph_backends"))
        return [(r.getMessage(), r.exc_info is not None) for r in ours]

    return warned


def _part(module: str, name: str) -> tuple[Any, str]:
    """What holds a part of ours, and its name there."""
    *path, last = name.split(".")
    owner: Any = importlib.import_module(f"{PACKAGE}.{module}")
    for step in path:
        owner = getattr(owner, step)
    return owner, last


def test_all_parts_that_may_break_are_there(host: Host) -> None:
    """Most of them break in long runs of the tests only."""
    parts = [_part(module, name) for module, name in BROKEN.values()]
    assert all(hasattr(owner, name) for owner, name in parts), BROKEN


@pytest.mark.parametrize("part", some_rows(BROKEN, list(BROKEN)[::3]))
def test_no_failure_of_ours_fails_a_prompt(
    xl: Subject, warned: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    eager = xl.sample(xl.model)
    ours = xl.lab.compiled(xl.model)
    xl.lab.compare_anew()
    module, name = BROKEN[part]
    calls: list[int] = []

    def broken(*_: Any, **__: Any) -> Any:
        calls.append(1)
        raise _BrokenError(f"{part} is broken")

    with monkeypatch.context() as patch:
        owner, last = _part(module, name)
        patch.setattr(owner, last, broken)
        for _ in range(2):
            assert relative(xl.sample(ours), eager) < TOLERANCE
            assert left_behind(xl.unet) == []
    assert calls, "it was not called"
    traced = [text for text, has_trace in warned() if has_trace]
    assert traced and len(set(traced)) == len(traced), "a warning with its trace, each once"
    again = xl.lab.compiled(xl.model)  # another node run is another try
    assert relative(xl.sample(again), eager) < TOLERANCE
    assert reasons(xl.report(again)) == {}


@pytest.mark.parametrize(
    "part",
    [
        "attaching.controlnet:_placement",
        "attaching.controlnet:_hang",
        "runtime.scope:Scope._prepare",
    ],
)
def test_no_failure_of_ours_in_a_controlnet_fails_a_prompt(
    lab: Lab, host: Host, warned: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    controlled = Controlled(lab, host)
    eager = controlled.sample(controlled.apply(controlled.plain))

    def broken(*_: Any, **__: Any) -> Any:
        raise _BrokenError(f"{part} is broken")

    module, _, path = part.partition(":")
    owner: Any = importlib.import_module(f"{PACKAGE}.{module}")
    *owners, name = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    monkeypatch.setattr(owner, name, broken)
    image = controlled.sample(controlled.apply(controlled.ours))
    assert relative(image, eager) < TOLERANCE
    assert any(f"{part} is broken" in text and trace for text, trace in warned())


def test_a_kind_that_fails_is_off_and_the_others_are_not(
    xl: Subject, warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that calls a keyword by another name, say, for some layers only."""
    import comfy.ops

    eager = xl.sample(xl.model)
    ours = xl.lab.compiled(xl.model)
    region = importlib.import_module(f"{PACKAGE}.runtime.region")
    compute = region.Region._compute

    def picky(self: Any, *inputs: Any) -> Any:
        if self.graph.description.form == "block":
            raise TypeError("cast_bias_weight() got an unexpected keyword argument")
        return compute(self, *inputs)

    with monkeypatch.context() as patch:
        patch.setattr(region.Region, "_compute", picky)
        assert relative(xl.sample(ours), eager) < TOLERANCE
        told = xl.report(ours)
    off = {reason: n for reason, n in reasons(told).items() if "unexpected keyword" in reason}
    assert sum(off.values()) == xl.blocks and told["regions"]["compiled"] > xl.blocks
    assert len([text for text, trace in warned() if trace]) == len(off)
    # The kind stays off although nothing fails any more, until the model is loaded anew.
    assert relative(xl.sample(ours), eager) < TOLERANCE
    assert sum(n for r, n in reasons(xl.report(ours)).items() if r in off) == xl.blocks
    xl.host.unload()
    assert relative(xl.sample(ours), eager) < TOLERANCE
    assert reasons(xl.report(ours)) == {}
    assert comfy.ops is not None


# --- what the host raises -------------------------------------------------------------------------


class _HostsError(Exception):
    """What the host's own code, or another node's, raises."""


@pytest.mark.parametrize(
    "error", some_rows([_HostsError, TypeError, ValueError, RuntimeError], [_HostsError, TypeError])
)
@pytest.mark.parametrize("place", ["wrapper", "block patch", "an eager layer"])
def test_what_the_host_raises_passes_through_once(
    xl: Subject, warned: Any, error: type[Exception], place: str
) -> None:
    raised: list[Exception] = []

    def fail(*_: Any, **__: Any) -> Any:
        raised.append(error("the host's own"))
        raise raised[-1]

    from comfy.patcher_extension import WrappersMP

    ours = xl.compiled.clone()
    layer = xl.unet.input_blocks[0][0]
    if place == "wrapper":
        ours.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "tests.fails", fail)
    elif place == "block patch":
        ours.set_model_output_block_patch(fail)
    else:
        layer.__dict__["forward"] = fail
    try:
        with pytest.raises(error) as caught:
            xl.sample(ours)
    finally:
        layer.__dict__.pop("forward", None)
    assert raised == [caught.value], "the same error, from one run"
    assert warned() == [] and left_behind(xl.unet) == []
    assert relative(xl.sample(xl.compiled), xl.sample(xl.model)) < TOLERANCE


def test_cancel_within_a_region_ends_the_prompt(
    xl: Subject, warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comfy.model_management import InterruptProcessingException

    verifier = importlib.import_module(f"{PACKAGE}.runtime.verifier")

    def cancelled(*_: Any) -> Any:
        raise InterruptProcessingException

    ours = xl.lab.compiled(xl.model)
    with monkeypatch.context() as patch:
        patch.setattr(verifier.Verifier, "covers", cancelled)
        with pytest.raises(InterruptProcessingException):
            xl.sample(ours)
    assert warned() == [] and left_behind(xl.unet) == []
    assert relative(xl.sample(ours), xl.sample(xl.model)) < TOLERANCE
    assert reasons(xl.report(ours)) == {}


# --- comparing again ------------------------------------------------------------------------------


def test_a_graph_is_compared_again_in_each_process_and_for_far_larger_calls(
    lab: Lab, host: Host, make_lab: Any
) -> None:
    fresh = make_lab()
    model, clip, _ = host.load("narrowxl")
    prompt = host.encode(clip, "a cat")
    compiled = fresh.compiled(model)
    kinds = len(fresh.engine.report(compiled)["kinds"])

    def compared(side: int, batch: int = 1) -> int:
        before = fresh.compared(compiled)
        latent = {"samples": torch.zeros(batch, 4, side, side)}
        host.sample(compiled, prompt, prompt, cfg=1.0, steps=1, latent=latent)
        return fresh.compared(compiled) - before

    assert compared(8) == kinds
    assert compared(8) == 0
    assert compared(16) <= 1  # four times the elements, unless first seen at a deeper level
    assert compared(40) >= kinds - 1  # twenty-five times
    assert compared(40) == 0 and compared(8) == 0
    again = fresh.copy_to(fresh.root / "again")  # a new server process
    try:
        fresh, compiled = again, again.compiled(model)
        assert compared(8) == kinds and compared(8) == 0
        assert again.engine._graphs.builds == 0
    finally:
        again.engine.close()
