"""A step that the user cancels ends within one region, as the host's own ends within one layer; and
a step within a recording of somebody else's is none of ours.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from warmgraph_backends.cuda_graphs import captured_call
from warmgraph_backends.runtime.region import Region
from warmgraph_backends.runtime.scope import Scope
from warmgraph_backends.runtime.verifier import Verifier
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, left_behind, relative
from .subject import Subject, reasons
from .test_replaced_code import around_the_model

CAPTURED = "another node, or ComfyUI, captures it into a CUDA graph of its own"
#: Of the narrow SDXL's blocks, the one after which something happens within a step.
BLOCK = 4


@pytest.fixture(scope="module")
def xl(lab: Lab, host: Host) -> Subject:
    return Subject(lab, host, "narrowxl")


def after_a_block(model: Any, happens: Callable[[], None]) -> Any:
    """A clone in whose steps something happens after `BLOCK`."""

    def patch(h: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        if options["block"] == ("input", BLOCK):
            happens()
        return h

    clone = model.clone()
    clone.set_model_input_block_patch(patch)
    return clone


def test_a_cancelled_step_runs_no_further_region(xl: Subject) -> None:
    from comfy.model_management import (
        InterruptProcessingException,
        interrupt_current_processing,
        processing_interrupted,
    )

    def calls() -> int:
        count: int = xl.report(xl.compiled)["calls"]["compiled"]
        return count

    eager, jobs, before = xl.sample(xl.model), xl.lab.jobs(), calls()
    assert relative(xl.sample(xl.compiled), eager) < TOLERANCE
    all_calls, until = calls() - before, []

    def cancel() -> None:
        until.append(calls())
        interrupt_current_processing(True)

    with pytest.raises(InterruptProcessingException):
        xl.sample(after_a_block(xl.compiled, cancel))
    assert before + all_calls < until[0] == calls(), "none after it"
    assert not processing_interrupted(), "the host's flag is the next prompt's"
    assert left_behind(xl.unet) == []
    assert relative(xl.sample(xl.compiled), eager) < TOLERANCE
    assert reasons(xl.report(xl.compiled)) == {} and xl.lab.jobs() == jobs
    assert calls() - until[0] == all_calls, "as many as in the run before"


def test_a_cancel_that_comes_while_a_place_waits_ends_the_step_before_it(
    xl: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comfy.model_management import (
        InterruptProcessingException,
        interrupt_current_processing,
    )

    xl.sample(xl.compiled)
    before = xl.report(xl.compiled)["calls"]["compiled"]
    lookahead = xl.compiled.get_attachment("warmgraph").scope.account.lookahead
    monkeypatch.setattr(lookahead, "wait", lambda device: interrupt_current_processing(True))
    with pytest.raises(InterruptProcessingException):
        xl.sample(xl.compiled)
    assert xl.report(xl.compiled)["calls"]["compiled"] == before


@pytest.mark.parametrize("within", [False, True])
def test_nothing_of_ours_runs_in_somebody_elses_capture(
    xl: Subject, monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    """The host's newer ones capture single blocks, within the step; others capture whole calls."""
    eager, jobs, capturing = xl.sample(xl.model), xl.lab.jobs(), [False]
    ours = xl.lab.compiled(xl.model)
    xl.lab.compare_anew()
    compared = xl.lab.compared(ours)
    monkeypatch.setattr(captured_call, "is_capturing", lambda device: capturing[0])
    waits: list[bool] = []
    lookahead = ours.get_attachment("warmgraph").scope.account.lookahead
    monkeypatch.setattr(lookahead, "wait", lambda device: waits.append(capturing[0]))

    @contextlib.contextmanager
    def capture() -> Iterator[None]:
        capturing[0] = not within
        try:
            yield
        finally:
            capturing[0] = False

    def begin() -> None:
        capturing[0] = True

    model = around_the_model(capture, outermost=True)(ours)
    if within:
        model = after_a_block(model, begin)
    image = xl.sample(model, steps=1)
    report = xl.report(ours)
    if within:
        assert xl.lab.compared(ours) > compared and report["calls"]["compiled"] > 0
        assert reasons(report)[CAPTURED] > 1 and waits
    else:
        assert torch.equal(image, xl.sample(xl.model, steps=1))
        assert xl.lab.compared(ours) == compared and CAPTURED in report["text"]
    assert not any(waits), "an event of a capture ends it where it is waited for"
    assert relative(image, xl.sample(xl.model, steps=1)) < TOLERANCE
    assert relative(xl.sample(ours), eager) < TOLERANCE
    assert reasons(xl.report(ours)) == {} and xl.lab.jobs() == jobs


def test_a_capture_of_ours_learns_that_a_graph_was_not_compared(
    xl: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = xl.lab.compiled(xl.model)
    xl.lab.compare_anew()
    monkeypatch.setattr(captured_call, "is_capturing", lambda device: True)

    def raised(*_: Any) -> Any:
        raise AssertionError("compared within a capture")

    monkeypatch.setattr(Verifier, "compare", raised)
    with captured_call.capturing(), pytest.raises(RuntimeError, match="not compared with eager"):
        xl.sample(ours, steps=1)
    assert left_behind(xl.unet) == []


class Recording:
    """What newer hosts open around a model's blocks: it counts the allocations of each turn, and
    what allocates otherwise within it has to hold it up meanwhile.
    """

    def __init__(self) -> None:
        self._comfy_active = False
        self.is_paused = False

    def begin(self) -> None:
        self._comfy_active = True

    def end(self) -> None:
        assert not self.is_paused, "it ends while it is held up"
        self._comfy_active = False

    @contextlib.contextmanager
    def opened(self, *, at_once: bool) -> Iterator[None]:
        if at_once:
            self.begin()
        yield
        self.end()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        if self._comfy_active:
            assert not self.is_paused, "held up twice: the inner one would let it go on"
            self.is_paused = True
        yield
        if self._comfy_active:
            self.is_paused = False


@pytest.mark.parametrize("within", [False, True])
def test_what_ours_allocates_is_kept_out_of_the_hosts_own_recording(
    xl: Subject, monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    prefetch: Any = importlib.import_module("comfy.model_prefetch")
    recording, seen = Recording(), []
    recordings = {threading.get_ident(): recording}
    monkeypatch.setattr(prefetch, "MALLOC_GRAPHS", recordings, raising=False)
    monkeypatch.setattr(prefetch, "pause_malloc_graph", recording.paused, raising=False)
    parts: list[tuple[Any, str]] = [(Region, "_compute"), (Verifier, "compare")]
    if not within:
        parts += [(Scope, "_prepare"), (Scope, "_bind")]
    for owner, name in parts:
        own = getattr(owner, name)

        def spied(*args: Any, own: Any = own, name: str = name, **kwargs: Any) -> Any:
            if recording._comfy_active:
                seen.append((name, recording.is_paused))
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, spied)
    eager = xl.sample(xl.model, steps=1)
    ours = xl.lab.compiled(xl.model)
    xl.lab.compare_anew()
    opened = partial(recording.opened, at_once=not within)
    model = around_the_model(opened, outermost=True)(ours)
    if within:
        model = after_a_block(model, recording.begin)
    assert relative(xl.sample(model, steps=1), eager) < TOLERANCE
    assert {name for name, _ in seen} >= {"_compute", "compare"}
    assert all(paused for _, paused in seen)
    assert reasons(xl.report(ours)) == {}
