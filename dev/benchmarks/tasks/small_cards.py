"""A card on which only a part of the model fits, in every way in which the host can run it."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import Any

from ..host import Size
from ..kernels import kernel_times
from ..measure import MIB, Stopwatch, vram_used_mib
from ..pack import brief
from .common import CAPTURE_STEPS, Pair, errors, partial, sample, unserved
from .overcommit import CFG, opened
from .residency import vram_left
from .speed import ratio, time_pair
from .vram import peak_mib

#: Of the runs whose peak and kernels are looked at.
MORE_STEPS = 2


def small_card(
    *,
    model: str,
    kind: str,
    store: str,
    size: list[int],
    leave_mib: int | None,
    second: str | None = None,
    rounds: int = 3,
    steps: int = 8,
    error_steps: int = 3,
    captured: bool = True,
    workers: int = 0,
) -> dict[str, Any]:
    """Time eager against ours and compare them, while another process holds most of the VRAM.

    A call has one prompt: how many the host puts into one would depend on the room there is.

    Args:
        leave_mib: how much VRAM is left to model and activations; None is all of it.
        second: path of a checkpoint that follows in the same prompt, as Wan 2.2's does.

    Returns:
        {"row": times and "speedup", "peak" of each form, in MiB, and its "profile", "rel_l2",
        "calls" and "eager_calls" of regions, "captured", "loaded_mib", "model_mib", "used_mib":
        what the driver says is in use, of all processes, "both": see `_both`}
    """
    target = Size(*size)
    # No worker comes or goes while room is counted: this engine builds, the next one finds.
    with opened(store, workers, captured) as engine:
        pair = Pair(engine, Path(model), kind=kind)
        pair.settle(kind, target)
    with opened(store, workers, captured) as engine:
        pair.compile(engine)
        pair.settle(kind, target)
        other = None if second is None else Pair(engine, Path(second), kind=kind)
        if other is not None:
            other.settle(kind, target)
        models = {"eager": (pair.eager, pair.eager_probe), "ours": (pair.ours, pair.ours_probe)}
        loaded_before = [each.ours for each in (pair, other) if each is not None]
        with vram_left(loaded_before, leave_mib):
            # Weights of a new class are compared at their first call, and a call may be captured.
            sample(pair.ours, kind, target, steps=CAPTURE_STEPS, cfg=CFG)
            row = time_pair(
                models, kind, target, rounds=rounds, steps=steps, image_steps=0, cfg=CFG
            )
            row["speedup"] = ratio(row, "eager", "ours")
            runs = {
                form: functools.partial(sample, chosen, kind, target, steps=MORE_STEPS, cfg=CFG)
                for form, (chosen, _) in models.items()
            }
            peak = {form: peak_mib(run) for form, run in runs.items()}
            profile = {form: kernel_times(run) for form, run in runs.items()}
            partial({"row": row, "peak": peak})
            before = pair.compiled_calls()
            found = errors(
                pair.ours,
                pair.ours_probe,
                pair.eager,
                pair.eager_probe,
                kind,
                target,
                steps=error_steps,
                cfg=CFG,
            )
            loaded, used = pair.ours.loaded_size(), vram_used_mib()
            report = engine.report(pair.ours)
            both = None if other is None else _both(pair, other, kind, target, rounds, steps)
    return {
        "row": row,
        "peak": peak,
        "profile": profile,
        "rel_l2": max(found),
        "calls": report["calls"]["compiled"] - before,
        "eager_calls": unserved(report, before, unet_calls=len(found)),
        "captured": report["captured"],
        "loaded_mib": round(loaded / MIB),
        "model_mib": round(pair.ours.model_size() / MIB),
        "used_mib": round(used),
        "report": brief(report),
        "both": both,
    }


def _both(
    pair: Pair, other: Pair, kind: str, size: Size, rounds: int, steps: int
) -> dict[str, Any]:
    """Time a prompt that samples with one model, then with another, for which the first must go.

    Returns:
        {"seconds" of each form, medians, "ratio" of ours to eager's, "rel_l2" of the second model's
        calls and its "eager_calls" of regions, of which there are "calls" that were compiled}
    """
    sample(other.ours, kind, size, steps=CAPTURE_STEPS, cfg=CFG)
    turns = {"eager": (pair.eager, other.eager), "ours": (pair.ours, other.ours)}
    seconds: dict[str, list[float]] = {form: [] for form in turns}
    for seed in range(rounds):
        for form, models in turns.items():
            watch = Stopwatch()
            for model in models:
                sample(model, kind, size, steps=steps, cfg=CFG, seed=seed)
            seconds[form].append(watch.seconds())
    before = other.compiled_calls()
    found = errors(
        other.ours,
        other.ours_probe,
        other.eager,
        other.eager_probe,
        kind,
        size,
        steps=MORE_STEPS,
        cfg=CFG,
    )
    report = other.engine.report(other.ours)
    eager, ours = (statistics.median(seconds[form]) for form in turns)
    return {
        "seconds": {"eager": round(eager, 3), "ours": round(ours, 3)},
        "ratio": round(ours / eager, 3),
        "rel_l2": max(found),
        "calls": report["calls"]["compiled"] - before,
        "eager_calls": unserved(report, before, unet_calls=len(found)),
    }
