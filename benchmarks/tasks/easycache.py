"""The host's EasyCache on a compiled model: which of the steps that it computes are replayed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ..measure import Stopwatch
from ..pack import brief, open_engine, settle, settle_second_graphs
from ..transformers import load, sample
from .common import BUILD_LIMIT_S, partial

#: Runs of one model; the last one is what is told.
RUNS = 3


def easycache(
    *,
    name: str,
    path: str,
    store: str,
    size: list[int],
    steps: int = 20,
    threshold: float = 1.0,
    workers: int = 0,
) -> dict[str, Any]:
    """Sample with EasyCache before Compile Model and behind it, and without Compile Model.

    Args:
        size: [width, height, frames], as of `transformers.sample`.
        threshold: of EasyCache's node; a larger one leaves out more steps.

    Returns:
        {"eager_seconds" of a run with EasyCache alone, "rows": {order: {"seconds", "computed" steps
        of a run, those that were "replayed", their "share", "exact_max_abs_diff" of latents by
        replayed steps of the host's own}}}
    """
    loaded = load(name, Path(path))
    engine = open_engine(Path(store), workers=workers)
    run = functools.partial(sample, name, size=size, steps=steps)
    eager = _cached(loaded, threshold)
    run(eager)
    latent, seconds = _timed(run, eager)
    result: dict[str, Any] = {"eager_seconds": seconds, "rows": {}}
    compiled = engine.compile_model(loaded, when_missing="wait", form="any shape")
    run(compiled)
    settle(engine, compiled, limit_s=BUILD_LIMIT_S)
    settle_second_graphs(engine, compiled, limit_s=BUILD_LIMIT_S)
    for order in ("before Compile Model", "behind Compile Model"):
        row: dict[str, Any] = {}
        for form in ("any shape", "exact"):
            first = order.startswith("before")
            model = _cached(loaded, threshold) if first else loaded
            model = engine.compile_model(model, when_missing="wait", form=form)
            model = model if first else _cached(model, threshold)
            for _ in range(RUNS):
                before = engine.report(model)
                ours, row_seconds = _timed(run, model)
            report = engine.report(model)
            if form == "exact":
                row["exact_max_abs_diff"] = float((ours - latent).abs().max())
                row["exact_replayed"] = _more(report, before, "captured", "replayed")
                row["exact_not_replayed"] = report["captured"]["not_replayed"]
                continue
            parts = max(report["regions"]["total"], 1)
            computed = _more(report, before, "calls", "compiled") / parts
            replayed = _more(report, before, "captured", "replayed")
            row |= {
                "seconds": row_seconds,
                "computed": computed,
                "replayed": replayed,
                "share": round(replayed / computed, 3) if computed else 0.0,
                "not_replayed": report["captured"]["not_replayed"],
                "report": brief(report),
            }
        result["rows"][order] = row
        partial(result)
    engine.close()
    return result


def _cached(model: Any, threshold: float) -> Any:
    """The model behind the host's EasyCache node, with its own settings but for the threshold."""
    from comfy_extras.nodes_easycache import EasyCacheNode

    return EasyCacheNode.execute(model, threshold, 0.15, 0.95, False).args[0]


def _timed(run: Any, model: Any) -> tuple[Any, float]:
    watch = Stopwatch()
    latent = run(model)
    return latent, round(watch.seconds(), 3)


def _more(now: dict[str, Any], before: dict[str, Any], group: str, name: str) -> int:
    return int(now[group][name] - before[group][name])
