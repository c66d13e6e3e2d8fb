"""Eager against ours, interleaved in one process: UNet step and KSampler wall time."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from ..host import Size
from ..measure import Mode, Probe, Stopwatch, summary
from ..pack import open_engine
from .common import Pair, errors, partial, sample, unserved

WARM_STEPS = 2  # of every run: the first steps load weights and fill queues


def speed(
    *,
    model: str,
    kind: str,
    store: str,
    sizes: list[list[int]],
    rounds: int = 5,
    steps: int = 8,
    image_steps: int = 20,
    captured: bool = False,
    workers: int = 0,
) -> dict[str, Any]:
    """Time both at every size, and compare them call by call.

    Returns:
        {"rows": {size: {"eager", "ours", "speedup", ...}}, "report"}; times in milliseconds.
    """
    engine = open_engine(Path(store), workers=workers, captured=captured)
    watch = Stopwatch()
    pair = Pair(engine, Path(model))
    report = pair.settle(kind, Size(*sizes[0]))
    result: dict[str, Any] = {
        "ready_seconds": round(watch.seconds(), 2),
        "report": report,
        "rows": {},
    }
    for width, height in sizes:
        size = Size(width, height)
        row = time_pair(
            {"eager": (pair.eager, pair.eager_probe), "ours": (pair.ours, pair.ours_probe)},
            kind,
            size,
            rounds=rounds,
            steps=steps,
            image_steps=image_steps,
        )
        row["speedup"] = ratio(row, "eager", "ours")
        before = pair.compiled_calls()
        found = errors(
            pair.ours, pair.ours_probe, pair.eager, pair.eager_probe, kind, size, steps=3
        )
        row["rel_l2"] = max(found)
        now = engine.report(pair.ours)
        row["eager_calls"] = unserved(now, before, unet_calls=len(found))
        result["rows"][f"{width}x{height}"] = row
        partial(result)
    result["compiled_calls"] = pair.compiled_calls()
    engine.close()
    return result


def time_pair(
    models: dict[str, tuple[Any, Probe]],
    kind: str,
    size: Size,
    *,
    rounds: int,
    steps: int,
    image_steps: int,
    cfg: float = 7.0,
) -> dict[str, Any]:
    """Take turns between the models, `rounds` times; each turn is a KSampler run of its own."""
    for model, _ in models.values():
        sample(model, kind, size, steps=WARM_STEPS, cfg=cfg)
    unet: dict[str, list[float]] = {name: [] for name in models}
    step: dict[str, list[float]] = {name: [] for name in models}
    image: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds):
        for name, (model, probe) in models.items():
            probe.start(Mode.TIME)
            sample(model, kind, size, steps=steps, cfg=cfg, seed=turn)
            unet[name] += probe.milliseconds(skip=WARM_STEPS)
            step[name] += probe.step_milliseconds(skip=WARM_STEPS)
            probe.start(Mode.OFF)
    for turn in range(3 if image_steps else 0):
        for name, (model, _) in models.items():
            watch = Stopwatch()
            sample(model, kind, size, steps=image_steps, cfg=cfg, seed=turn)
            image[name].append(watch.seconds())
    row: dict[str, Any] = {}
    for name in models:
        row[name] = {"unet_ms": summary(unet[name]), "step_ms": summary(step[name])}
        if image[name]:
            row[name]["ksampler_seconds"] = round(statistics.median(image[name]), 3)
    return row


def ratio(row: dict[str, Any], slow: str, fast: str) -> float:
    """How many times quicker one model's UNet call is, by medians."""
    return round(row[slow]["unet_ms"]["median"] / row[fast]["unet_ms"]["median"], 3)
