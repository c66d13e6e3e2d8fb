"""What a KSampler costs besides its steps, and what the first run of a size costs more."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from ..host import Size
from ..measure import Mode, Probe, Stopwatch
from ..pack import open_engine
from .common import CAPTURE_STEPS, Pair, partial, sample

RUNS = 5
LATER_RUNS = 2


def run_costs(
    *,
    model: str,
    kind: str,
    store: str,
    sizes: list[list[int]],
    steps: int = 20,
    workers: int = 0,
) -> dict[str, Any]:
    """Time whole KSampler runs, eager and any-shape by turns.

    Args:
        sizes: [width, height] in pixels; the first is seen before, the others are new.

    Returns:
        {"overhead": {name: {"seconds" of each run, its "calls_seconds" on the GPU's clock,
        "overhead_seconds" (the median of what is not within a call)}}, "new_sizes": {size: {name:
        {"first", "later" (each), "more_seconds"}}}, "capture_seconds" (the median over the sizes of
        what any-shape's first run costs more)}
    """
    engine = open_engine(Path(store), workers=workers)
    first, *others = (Size(*each) for each in sizes)
    pair = Pair(engine, Path(model))
    pair.settle(kind, first)
    models: dict[str, tuple[Any, Probe]] = {
        "eager": (pair.eager, pair.eager_probe),
        "any_shape": (pair.ours, pair.ours_probe),
    }
    for compiled, _ in models.values():
        sample(compiled, kind, first, steps=CAPTURE_STEPS)
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "calls_seconds": []} for name in models
    }
    for turn in range(RUNS):
        for name, (compiled, probe) in models.items():
            probe.start(Mode.TIME)
            watch = Stopwatch()
            sample(compiled, kind, first, steps=steps, seed=turn)
            found[name]["seconds"].append(round(watch.seconds(), 4))
            calls = sum(probe.milliseconds(skip=0)) / 1000.0
            found[name]["calls_seconds"].append(round(calls, 4))
            probe.start(Mode.OFF)
    for row in found.values():
        pairs = zip(row["seconds"], row["calls_seconds"], strict=True)
        row["overhead_seconds"] = round(statistics.median(a - b for a, b in pairs), 4)
    result: dict[str, Any] = {"overhead": found, "new_sizes": {}}
    partial(result)
    for size in others:
        row = {}
        for name, (compiled, _) in models.items():
            seconds = []
            for _ in range(1 + LATER_RUNS):
                watch = Stopwatch()
                sample(compiled, kind, size, steps=steps)
                seconds.append(round(watch.seconds(), 4))
            more = round(seconds[0] - statistics.mean(seconds[1:]), 4)
            row[name] = {"first": seconds[0], "later": seconds[1:], "more_seconds": more}
        result["new_sizes"][f"{size.width}x{size.height}"] = row
        partial(result)
    result["capture_seconds"] = round(
        statistics.median(row["any_shape"]["more_seconds"] for row in result["new_sizes"].values()),
        3,
    )
    result["captured"] = engine.report(pair.ours)["captured"]
    engine.close()
    return result
