"""In the background: eager's very image at first, then graphs as they arrive, no waiting."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.building.claims import BY_ANOTHER_SERVER, Claims
from warmgraph_backends.sessions.lines import Line
from warmgraph_backends.storing.signing import Signer
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab
from .probed import Probed
from .rows import some_rows

KINDS = (
    "ResBlock 64->64",
    "ResBlock 128->64",
    "Transformer block 64",
    "Transformer entry 64",
    "Transformer exit 64",
    "Downsample 64",
    "Upsample 64",
    "Output head 64",
)
QUICK = "Transformer entry 64"  # its build takes least


def test_first_image_is_eagers_very_image_while_nothing_is_ready(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    """Nor is anything waited for: it could not end before the gate opens."""
    lab = make_lab()
    with lab.held():
        model = Probed(lab, host, when_missing="background")
        image = model.sample(steps=4)
        assert torch.equal(image, model.sample(model.plain, steps=4))
        report = model.report()
        assert report["regions"]["compiled"] == report["calls"]["compiled"] == 0
        assert [entry["reason"] for entry in report["eager"]] == ["it is being loaded"]
        eager = report["speed"]
        assert eager["form"] == "eager" and eager["ms"]["eager"] > 0 and len(eager["ms"]) == 1
        assert report["standing"] == "building"
    lab.settle()
    model.check(steps=4)
    assert lab.counts(model.model) == (0, len(KINDS), 0)
    for each in (model.model, lab.compiled(model.plain)):  # as after a changed LoRA: a new session
        model.sample(each, steps=4)
        speed = lab.engine.report(each)["speed"]
        assert lab.engine.report(each)["standing"] == "compiled"
        assert speed["form"] == "compiled" and speed["ms"]["compiled"] > 0
        assert speed["ms"]["eager"] > 0 and speed["size"] == eager["size"]
    overview = lab.engine.overview  # it has the runs of the lab that this one is a copy of, too
    runs = overview.details()["runs"][-overview.snapshot()["runs_made"] :]
    assert [(run["form"], run["steps"]) for run in runs] == [
        ("eager", 4),
        *[("compiled", 4)] * (len(runs) - 1),
    ]
    assert len(runs) >= 4 and runs[-1]["eager_ms"] == runs[-2]["eager_ms"] > 0
    again = Probed(lab.copy_to(lab.root.with_name("restarted")), host)
    again.sample(steps=4)
    after = again.report()["speed"]
    assert after["ms"]["eager"] == speed["ms"]["eager"] == eager["ms"]["eager"]
    assert after["form"] == "compiled" and again.lab.jobs() == 0
    again.lab.engine.close()


def test_with_backend_eager_nothing_is_done_but_to_time_the_steps(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    """So a user whose graphs were there from the first image on learns what they save."""
    lab = make_lab()
    model = Probed(lab, host, backend="eager")
    assert torch.equal(model.sample(steps=4), model.sample(model.plain, steps=4))
    report = model.report()
    assert report["notes"] == ["the compiler is off, to compare"] and report["standing"] == "eager"
    assert report["regions"]["total"] == lab.jobs() == 0
    assert report["speed"]["form"] == "eager" and list(report["speed"]["ms"]) == ["eager"]
    eager = report["speed"]["ms"]["eager"]
    (run,) = lab.engine.overview.details()["runs"][-1:]
    assert run["form"] == "eager" and run["eager_ms"] == run["ms"] == pytest.approx(eager, abs=1e-3)


def _steps(model: Probed, callback: Callable[..., None], steps: int) -> torch.Tensor:
    """Sample through the host's own functions, with a callback after each step."""
    import comfy.sample

    latent = torch.zeros(1, 4, 8, 8)
    model.probe.calls.clear()
    return comfy.sample.sample(
        model.model,
        comfy.sample.prepare_noise(latent, 1),
        steps,
        7.0,
        "euler",
        "normal",
        model.positive,
        model.negative,
        latent,
        callback=callback,
        disable_pbar=True,
        seed=1,
    )


def test_graphs_swap_in_between_two_steps_of_one_run(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab()
    compiled: list[int] = []
    with lab.held() as gate:
        model = Probed(lab, host, when_missing="background")

        def after_step(step: int, *_: Any) -> None:
            compiled.append(model.report()["calls"]["compiled"])
            if step == 1:
                gate.set()
                lab.settle()

        _steps(model, after_step, 4)
    regions = model.report()["regions"]["total"]
    assert compiled == [0, 0, regions, 2 * regions]
    assert [call.is_equal for call in model.probe.calls] == [True, True, False, False]
    assert max(call.error for call in model.probe.calls) <= TOLERANCE
    assert model.report()["regions"]["eager"] == 0


@pytest.mark.parametrize("missing", some_rows(KINDS, KINDS[:3]))
def test_a_step_is_right_whichever_kind_is_still_missing(
    host: Host, make_lab: Callable[..., Lab], missing: str
) -> None:
    lab = make_lab(without=(missing,))
    model = Probed(lab, host, when_missing="never")
    lab.settle()
    model.sample(size=(9, 7))
    report = model.report()
    assert [call.error <= TOLERANCE for call in model.probe.calls] == [True]
    assert [miss["kind"] for miss in report["misses"]] == [missing]
    assert 0 < report["regions"]["eager"] < report["regions"]["total"]
    assert report["calls"]["compiled"] == report["regions"]["compiled"]


def test_never_with_an_empty_store_is_eager_with_a_reason(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab(empty=True)
    model = Probed(lab, host, when_missing="never")
    lab.settle()
    image = model.sample(steps=2)
    assert torch.equal(image, model.sample(model.plain, steps=2))
    report = model.report()
    assert [(e["reason"], e["places"]) for e in report["eager"]] == [
        ("no compiled graph", report["regions"]["total"])
    ]
    assert lab.jobs() == lab.builds() == 0 and not list(lab.store.glob("*"))


@pytest.mark.slow  # as in tests/host/test_nodes.py
def test_cancel_ends_waiting_at_once_and_leaves_the_builds_running(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    from comfy.model_management import InterruptProcessingException

    lab = make_lab(without=(QUICK,))
    asked = threading.Event()

    def cancelled() -> None:
        if asked.is_set():
            raise InterruptProcessingException

    lab.cancelled = cancelled
    told: list[tuple[int, int]] = []

    def on_progress(done: int, total: int, now: Line) -> None:
        told.append((done, total))
        others = len(lab.engine._graphs.ready_keys())
        if now.key.startswith("building") and others == len(KINDS) - 1:
            asked.set()

    model, _, _ = host.load("narrowxl")
    with pytest.raises(InterruptProcessingException):
        lab.compiled(model, on_progress=on_progress)
    assert told == sorted(told) and told[-1][0] < told[-1][1] == 100 and lab.jobs() == 1
    asked.clear()
    compiled = lab.compiled(model, when_missing="background")
    lab.wait_until(lambda: lab.is_settled(compiled))
    assert lab.counts(compiled) == (1, 0, 0)
    assert lab.engine.report(compiled)["reused"] == len(KINDS) - 1
    assert lab.jobs() == lab.builds() == 1


@pytest.mark.slow  # as in tests/host/test_overview.py
def test_a_wait_that_is_paused_says_so_and_ends_with_the_builds(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    """Pause, Run, Cancel, Run: the second one builds."""
    lab = make_lab(without=(QUICK,))
    overview = lab.engine.overview
    overview.pause_builds(True)
    said: list[str] = []

    def on_progress(done: int, total: int, now: Line) -> None:
        said.append(now.text)
        if now.key == "building_paused":
            assert "Compiling is paused" in overview.cancelled().text
            overview.cancel_builds()

    first = lab.compiled(host.load("narrowxl")[0], on_progress=on_progress)
    assert "Compiling SDXL: 0 of 1, paused" in said
    (miss,) = lab.engine.report(first)["misses"]
    assert miss["reason"] == "compiling it was cancelled"
    assert overview.cancelled().text == "Cancelled." and not overview.building()["paused"]
    second = lab.compiled(host.load("narrowxl")[0])
    assert lab.counts(second) == (1, 0, 0) and lab.builds() == 1


def test_who_wants_a_build_gets_it_although_another_only_looked_for_a_file(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab(without=(QUICK,))
    with lab.held() as gate:
        looking = lab.compiled(host.load("narrowxl")[0], when_missing="never")
        asking = lab.compiled(host.load("narrowxl")[0], when_missing="background")
        gate.set()
        lab.settle()
    states = [kind["state"] for kind in lab.engine.report(asking)["kinds"]]
    assert sorted(set(states)) == ["building", "ready"] and lab.jobs() == 1
    assert lab.engine.report(looking)["builds"] == 0


def test_what_another_server_builds_is_named_waited_for_and_then_loaded(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    """The other one is a second owner of claims on the same store."""
    lab = make_lab(without=(QUICK,))
    looked = lab.compiled(host.load("narrowxl")[0], when_missing="never")
    lab.settle()
    (key,) = [k["key"] for k in lab.engine.report(looked)["kinds"] if k["state"] != "ready"]
    signer = Signer(lab.root / "user" / "__warmgraph")
    other = Claims(lab.store, signer, patience_s=lambda: 60.0)
    assert other.take(key)
    model = Probed(lab, host, when_missing="background")
    lab.settle()
    report = model.report()
    assert {e["reason"] for e in report["eager"]} == {BY_ANOTHER_SERVER}
    assert [m["reason"] for m in report["misses"]] == [BY_ANOTHER_SERVER]
    assert lab.jobs() == 0 and not lab.is_settled(model.model)
    shutil.copy(next((make_lab().store).glob(f"{key}.*")), lab.store)
    other.close()
    lab.wait_until(lambda: lab.is_settled(model.model))
    assert lab.jobs() == 0
    model.check()
