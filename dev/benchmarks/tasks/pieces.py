"""Blocks replayed one by one, beside eager and compiled calls; and how soon a cancel ends."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..measure import Mode, Probe, flat, peak_mib, rel_l2, start_peak, summary
from ..pack import ROOT, brief, import_alias, open_engine, settle, settle_second_graphs
from ..transformers import load, sample
from .common import BUILD_LIMIT_S, CAPTURE_STEPS, partial

WARM_STEPS = CAPTURE_STEPS
#: Of a step, when it is cancelled.
CANCELLED_AFTER = 0.3


def pieces(
    *,
    name: str,
    path: str,
    store: str,
    size: list[int],
    override: str = "",
    rounds: int = 2,
    steps: int = 6,
    workers: int = 0,
) -> dict[str, Any]:
    """Time a model's steps by turns: eager, ours with no block replayed, and ours.

    Args:
        path: of its file, written now if it is not there.
        size: as `transformers.sample` takes it.
        override: an attention that a node puts there, for all three: "known" is one whose code
            keeps nothing, "unknown" one that counts its calls, "given" one that blocks are given
            and that leaves three in four keys out; "" for none.

    Returns:
        {"step_ms", "peak_mib" of each form, "speedup", "speedup_of_calls", "rel_l2" against eager,
        "max_abs_diff" of ours against ours with no block replayed, "captured", "calls" of the
        override in each form's last run}
    """
    loaded = load(name, Path(path))
    attend = _attention(override)
    probes = {form: Probe() for form in ("eager", "ours")}
    models = {
        form: overridden(probe.attach(loaded), attend, override) for form, probe in probes.items()
    }
    run = functools.partial(sample, name)
    engine = open_engine(Path(store), workers=workers)
    from warmgraph_backends.cuda_graphs import pieces as room

    run(models["eager"], size, steps=1)
    ours = engine.compile_model(models["ours"], when_missing="wait")
    run(ours, size, steps=1)
    settle(engine, ours, limit_s=BUILD_LIMIT_S)
    settle_second_graphs(engine, ours, limit_s=BUILD_LIMIT_S)
    forms = {
        "eager": (models["eager"], probes["eager"], room.IDLE_SHARE),
        "calls": (ours, probes["ours"], float("inf")),
        "ours": (ours, probes["ours"], room.IDLE_SHARE),
    }
    share = room.IDLE_SHARE
    times: dict[str, list[float]] = {form: [] for form in forms}
    peaks, images, calls = dict.fromkeys(forms, 0.0), {}, {}
    try:
        for turn in range(rounds + 1):  # the first one compares and captures
            for form, (model, probe, room.IDLE_SHARE) in forms.items():
                ours.get_attachment("warmgraph").scope.give_back()
                probe.start(Mode.TIME)
                start_peak()
                if attend is not attends:
                    attend.begin_run()
                images[form] = flat(run(model, size, steps=WARM_STEPS + steps, seed=turn))
                calls[form] = attend.calls
                if turn:
                    peaks[form] = max(peaks[form], peak_mib())
                    times[form] += probe.step_milliseconds(skip=WARM_STEPS)
                probe.start(Mode.OFF)
    finally:
        room.IDLE_SHARE = share
    report = engine.report(ours)
    medians = {form: summary(values) for form, values in times.items()}
    result = {
        "step_ms": medians,
        "peak_mib": {form: round(peak) for form, peak in peaks.items()},
        "speedup": round(medians["eager"]["median"] / medians["ours"]["median"], 3),
        "speedup_of_calls": round(medians["eager"]["median"] / medians["calls"]["median"], 3),
        "rel_l2": rel_l2(images["ours"], images["eager"]),
        "max_abs_diff": float((images["ours"] - images["calls"]).abs().max()),
        "captured": report["captured"],
        "calls": calls,
        "report": brief(report),
    }
    partial(result)
    engine.close()
    return result


def pieces_of_each(
    *, models: dict[str, list[int]], stores: dict[str, str], overrides: list[str], workers: int = 0
) -> dict[str, Any]:
    """Run `pieces` of each small model under each override, in one process.

    Args:
        models: their sizes by name.
        stores: likewise.

    Returns:
        {"rows": [{"name", "override", and what `pieces` returns}]}
    """
    rows = []
    for name, size in models.items():
        for override in overrides:
            found = pieces(
                name=name,
                path="",
                store=stores[name],
                size=size,
                override=override,
                workers=workers,
            )
            rows.append({"name": name, "override": override, **found})
            partial({"rows": rows})
    return {"rows": rows}


def interrupt(
    *, name: str, path: str, store: str, size: list[int], workers: int = 0
) -> dict[str, Any]:
    """Seconds from a cancel within a step, of ours and of eager, until the GPU is free.

    Returns:
        {"step_seconds", "ours_seconds", "eager_seconds"}
    """
    import torch

    loaded = load(name, Path(path))
    probe = Probe()
    model = probe.attach(loaded)
    run = functools.partial(sample, name)
    engine = open_engine(Path(store), workers=workers)
    ours = engine.compile_model(model, when_missing="wait")
    run(ours, size, steps=1)
    settle(engine, ours, limit_s=BUILD_LIMIT_S)
    settle_second_graphs(engine, ours, limit_s=BUILD_LIMIT_S)
    run(ours, size, steps=3)
    probe.start(Mode.TIME)
    run(ours, size, steps=3)
    (*_, step) = probe.milliseconds(skip=1)
    probe.start(Mode.OFF)
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    after_s = (1.0 + CANCELLED_AFTER) * step / 1000  # in the second step
    result = {"step_seconds": round(step / 1000, 3)}
    for form, each in (("ours", ours), ("eager", model)):
        result[f"{form}_seconds"] = round(
            _until_free(functools.partial(run, each, size), after_s, wait), 3
        )
    partial(result)
    engine.close()
    return result


def _until_free(run: Callable[..., Any], after_s: float, wait: Callable[[], None]) -> float:
    from comfy import model_management

    cancelled = []

    def cancel() -> None:
        cancelled.append(time.perf_counter())
        model_management.interrupt_current_processing()

    timer = threading.Timer(after_s, cancel)
    timer.start()
    try:
        run(steps=6)
    except model_management.InterruptProcessingException:
        wait()
        return time.perf_counter() - cancelled[0]
    finally:
        timer.cancel()
    raise RuntimeError("the run came to its end before it was cancelled")


def attends(function: Any, *args: Any, **kwargs: Any) -> Any:
    """As an attention of a pack that keeps nothing."""
    return function(*args, **kwargs)


attends.calls = 0  # type: ignore[attr-defined]


def _attention(override: str) -> Any:
    if override != "given":
        return Attention() if override == "unknown" else attends
    import_alias("warmgraph_tools", ROOT / "dev" / "tools")
    from warmgraph_tools.sparse_attention import SparseAttention

    return SparseAttention(block=64, part=4)


class Attention:
    """As an attention of a pack that is not known: it counts."""

    def __init__(self) -> None:
        self.begin_run()

    def begin_run(self) -> None:
        """Count anew."""
        self.calls = 0

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return function(*args, **kwargs)


def overridden(model: Any, attend: Any, override: str) -> Any:
    """The model, with an attention of its own if there is to be one."""
    if override == "given":
        return attend.patched(model)
    if override:
        options = model.model_options.setdefault("transformer_options", {})
        options["optimized_attention_override"] = attend
    return model
