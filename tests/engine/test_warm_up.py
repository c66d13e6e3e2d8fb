"""Warm Up: all graphs loaded or built and run once, without an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from warmgraph_backends.sessions.lines import Line
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, left_behind
from .probed import Probed

KINDS = 8


def test_warm_up_loads_all_graphs_and_runs_each_size_and_batch(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab()
    with lab.held() as gate:
        model = Probed(lab, host, when_missing="background")
        gate.set()
    told: list[tuple[int, int, Line]] = []
    report = lab.engine.warm_up(
        model.model,
        [(64, 96), (200, 264)],
        [1, 3],
        on_progress=lambda *progress: told.append(progress),
    )
    assert report["loads"] == KINDS and report["regions"]["eager"] == 0
    shapes = [call.shape for call in model.probe.calls]
    assert sorted(shapes) == sorted(
        (2 * batch, 4, *size) for size in [(12, 8), (33, 25)] for batch in (1, 3)
    )
    assert [shape[0] * shape[2] * shape[3] for shape in shapes] == sorted(
        (shape[0] * shape[2] * shape[3] for shape in shapes), reverse=True
    ), "the largest first: what it needs serves the others"
    assert all(call.error <= TOLERANCE and not call.is_equal for call in model.probe.calls)
    assert report["calls"] == {"compiled": 4 * report["regions"]["total"], "eager": 0}
    assert told[-4][:2] == (0, 4) and "200x264, batch 3" in told[-4][2].text
    assert told[-1][:2] == (3, 4) and "64x96, batch 1" in told[-1][2].text
    assert left_behind(model.unet) == [] and lab.engine._prompts.sampling == 0
    model.check(size=(45, 60))


def test_warm_up_stops_when_the_user_cancels(host: Host, make_lab: Callable[..., Lab]) -> None:
    from comfy.model_management import InterruptProcessingException

    lab = make_lab()
    model = Probed(lab, host)

    def cancelled() -> None:
        if model.probe.calls:
            raise InterruptProcessingException

    lab.cancelled = cancelled
    with pytest.raises(InterruptProcessingException):
        lab.engine.warm_up(model.model, [(64, 64), (72, 72)], [1])
    assert len(model.probe.calls) == 1 and lab.engine._prompts.sampling == 0


def test_warm_up_of_a_model_that_may_not_build_says_what_is_missing(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab(without=("Downsample 64",))
    model = Probed(lab, host, when_missing="never")
    report = lab.engine.warm_up(model.model, [(64, 64)], [1])
    assert lab.jobs() == 0
    assert [miss["kind"] for miss in report["misses"]] == ["Downsample 64"]
    assert report["regions"]["eager"] == 2


@pytest.mark.parametrize("kind", ["narrow15", "narrow15inpaint", "narrow20"])
def test_warm_up_runs_a_step_of_other_layouts(
    kind: str, host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab(empty=True)
    model, _, _ = host.load(kind)
    seen: list[Any] = []

    def watch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(args[0].shape))
        return executor(*args, **kwargs)

    from comfy.patcher_extension import WrappersMP

    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "watch", watch)
    compiled = lab.compiled(model, when_missing="never")
    report = lab.engine.warm_up(compiled, [(64, 72)], [2])
    channels = model.model.model_config.unet_config["in_channels"]
    assert seen == [(4, channels, 9, 8)]
    assert report["regions"]["compiled"] == 0


def test_warm_up_of_a_model_that_is_not_ours_says_so(lab: Lab, host: Host) -> None:
    model, _, _ = host.load("narrow15")
    report = lab.engine.warm_up(model, [(64, 64)], [1])
    assert report["notes"] == ["this model did not come out of Warmgraph"]
