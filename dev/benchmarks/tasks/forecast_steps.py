"""Step Cache around compiled and replayed steps: whole sampler runs by turns."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from ..host import Size
from ..measure import Stopwatch, rel_l2
from ..pack import open_engine, settle, settle_second_graphs
from .common import BUILD_LIMIT_S, CAPTURE_STEPS, load_kind, partial, sample

STEPS = 24
#: Half of the steps are computed.
SPEED = 2.0
#: Runs of a model before those that count: graphs are compared, then calls captured.
WARM_RUNS = 2


def forecast_steps(
    *,
    model: str,
    kind: str,
    store: str,
    size: list[int],
    steps: int = STEPS,
    speed: float = SPEED,
    rounds: int = 5,
    workers: int = 0,
) -> dict[str, Any]:
    """Time runs by turns: eager, Compile Model, and Step Cache with it before and behind.

    Args:
        size: [width, height].
        speed: of Step Cache.

    Returns:
        {"run_seconds": {way: [each run]}, "medians", "speedup" (Compile Model / with Step Cache
        behind it), "total_speedup" (eager / that), "computed", "replayed", "captures", "rel_l2"
        (against Compile Model alone), "report"}
    """
    engine = open_engine(Path(store), workers=workers)
    from warmgraph_backends.stepcache.run import StepCacheOptions

    target, options = Size(*size), StepCacheOptions(speed=speed)
    eager = load_kind(kind, Path(model))
    sample(eager, kind, target, steps=CAPTURE_STEPS)  # see `captured.exact`
    ours = engine.compile_model(eager, when_missing="wait")
    sample(ours, kind, target, steps=1)
    settle(engine, ours, limit_s=BUILD_LIMIT_S)
    settle_second_graphs(engine, ours, limit_s=BUILD_LIMIT_S)
    behind, identifier = engine.caches.stepcache(ours, options)
    before, _ = engine.caches.stepcache(eager, options)
    ways = {
        "eager": eager,
        "compiled": ours,
        "step cache behind": behind,
        "step cache before": engine.compile_model(before, when_missing="wait"),
    }
    for way, each in ways.items():
        for _ in range(1 if way == "eager" else WARM_RUNS):
            sample(each, kind, target, steps=steps)
    replayed = {way: engine.report(ways[way])["captured"]["replayed"] for way in ways}
    captures = {way: engine.report(ways[way])["captured"].get("captures", 0) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    latents: dict[str, Any] = {}
    for turn in range(rounds):
        for way, each in ways.items():
            sample(each, kind, target, steps=2)  # the host loads another clone's model anew
            watch = Stopwatch()
            latents[way] = sample(each, kind, target, steps=steps, seed=turn)
            seconds[way].append(round(watch.seconds(), 4))
        partial({"run_seconds": seconds})
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    reports = {way: engine.report(each) for way, each in ways.items()}
    cache = next(c for c in engine.overview.snapshot()["stepcaches"] if c["id"] == identifier)
    result = {
        "run_seconds": seconds,
        "medians": medians,
        "speedup": round(medians["compiled"] / medians["step cache behind"], 3),
        "total_speedup": round(medians["eager"] / medians["step cache behind"], 3),
        "steps": cache["steps"],
        "computed": cache["computed"],
        "cache": cache["text"],
        "replayed": {
            way: (reports[way]["captured"]["replayed"] - replayed[way]) / rounds for way in ways
        },
        "new_captures": {
            way: reports[way]["captured"].get("captures", 0) - captures[way] for way in ways
        },
        "rel_l2": rel_l2(latents["step cache behind"], latents["compiled"]),
        "orders_differ": rel_l2(latents["step cache behind"], latents["step cache before"]),
    }
    engine.close()
    return result
