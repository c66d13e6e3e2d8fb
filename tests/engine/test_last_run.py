"""What a node calls compiled: what ran compiled in the last run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.deepcache.run import DeepCacheOptions
from warmgraph_backends.deepcache.schedule import Schedule
from warmgraph_tools.inprocess import Host

from .lab import Lab
from .probed import Probed
from .transformer_runs import Run

TOTAL = 38  # of a narrow SDXL


def _said(report: dict[str, Any]) -> str:
    """The line of a node that says how far its model is."""
    (line,) = (each["text"] for each in report["lines"] if " part" in each["text"])
    return str(line)


def _counts(report: dict[str, Any]) -> tuple[int, int, int, int]:
    """(compiled in the last run, ready for the next, not called, eager)."""
    regions = report["regions"]
    assert regions["compiled"] + regions["eager"] == regions["total"]
    ran = regions["compiled"] - report["ready"]
    return ran, report["ready"], report["idle"], regions["eager"]


def test_nothing_is_compiled_before_a_run_has_used_it(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab()
    with lab.held():
        model = Probed(lab, host, when_missing="background")
        model.sample()
        assert _counts(model.report()) == (0, 0, 0, TOTAL)
    lab.settle()
    report = model.report()
    assert _counts(report) == (0, TOTAL, 0, 0) and report["standing"] == "waiting"
    assert report["stage"] == "ready" and report["lines"][0]["key"] == "ready"
    assert _said(report) == "SDXL: 38 of 38 parts compiled"
    model.sample()
    report = model.report()
    assert _counts(report) == (TOTAL, 0, 0, 0) and report["standing"] == "compiled"
    assert _said(report).endswith("38 of 38 parts compiled")
    again = lab.engine.report(lab.compiled(model.plain))
    assert _counts(again) == (0, TOTAL, 0, 0) and again["standing"] == "waiting"


def test_a_run_that_uses_none_of_them_is_told_as_what_it_is(probed: Probed) -> None:
    probed.check()
    root, forward = probed.unet, probed.unet._forward

    def nothing(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return x

    root._forward = nothing
    try:
        probed.sample()
    finally:
        del root._forward
    assert root._forward == forward
    report = probed.report()
    assert _counts(report) == (0, 0, TOTAL, 0) and report["standing"] == "waiting"
    assert _said(report).endswith("the last run called none of its 38 compiled parts")
    probed.check()
    assert probed.report()["standing"] == "compiled"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen", "wan_5b"])
def test_another_way_to_call_a_block_is_no_failure_where_it_is_not_needed(
    host: Host, shared: Lab, kind: str
) -> None:
    run = Run(host, shared, kind)
    expected = run.expected
    for _ in range(2):
        run.check()
        report = shared.engine.report(run.model)
        assert _counts(report) == (expected.places - expected.others, 0, expected.others, 0)
        called = expected.places - expected.others
        assert _said(report).endswith(f"{called} of {called} parts compiled")
        assert f"{expected.others} compiled parts were not called in the last run" in report["text"]


def test_shallow_steps_of_deepcache_take_nothing_away_from_the_full_ones(probed: Probed) -> None:
    lab, options = probed.lab, DeepCacheOptions(interval=2, branch=0, schedule=Schedule.UNIFORM)
    model, _ = lab.engine.caches.deepcache(lab.compiled(probed.plain), options)
    probed.sample(model, steps=4)
    report = lab.engine.report(model)
    assert report["deepcache"]["chunks"][0]["shallow"] == 2
    assert _counts(report) == (TOTAL, 0, 0, 0) and report["standing"] == "compiled"
