"""DeepCache with and without Compile Model, against the host alone: whole images."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..host import Size, load_unet
from ..kernels import kernel_times
from ..measure import Stopwatch, rel_l2
from ..pack import brief, graph_files, import_engine, open_engine, settle
from .common import BUILD_LIMIT_S, CAPTURE_STEPS, partial, sample
from .residency import left_wrong

INTERVAL = 3


def deepcache(
    *,
    model: str,
    kind: str,
    store: str,
    size: list[int],
    images: int = 7,
    steps: int = 20,
    workers: int = 0,
) -> dict[str, Any]:
    """Time the KSampler node of four models in turns: the host's own, DeepCache on it, Compile
    Model, and both together, in either order.

    Before each image that is timed the same model makes a few steps: the host loads a model anew
    when another clone of it had its turn, which no user's images pay.

    Returns:
        {"ksampler_seconds": {name: median}, "speedups" over the host alone,
        "max_abs_diff_interval1", "max_abs_diff_eager_again" (the host alone before and after ours),
        "rel_l2_eager_start" (its first image in this process, which no other is compared with),
        "left_wrong" (`residency.left_wrong`),
        "rel_l2_compiled" (final latents, both against DeepCache alone),
        "builds_by_deepcache", "captures_by_interval" (what another interval made captured anew),
        "reports", "profile"}
    """
    store_path, target = Path(store), Size(*size)
    engine = open_engine(store_path, workers=workers)
    eager = load_unet(Path(model))
    compiled = engine.compile_model(eager, when_missing="wait")
    for _ in range(5):
        sample(compiled, kind, target, steps=CAPTURE_STEPS)
        settle(engine, compiled, limit_s=BUILD_LIMIT_S)
    files = set(graph_files(store_path))
    result: dict[str, Any] = {"left_wrong": {"by_compiled": left_wrong(eager)}}
    models = {
        "eager": eager,
        "deepcache": _cached(engine, eager),
        "compiled": compiled,
        "both": _cached(engine, compiled),
        "both_swapped": engine.compile_model(_cached(engine, eager), when_missing="wait"),
    }

    def image(name: str, seed: int) -> Any:
        return sample(models[name], kind, target, steps=steps, seed=seed)

    # On Hopper torch 2.11 gives the first attention of a process to cuDNN, whatever order the host
    # asks for: the host's own first image is not like its later ones.
    start = image("eager", 0)
    watch = Stopwatch()
    latents = {name: image(name, 0) for name in models}
    result["first_images_seconds"] = round(watch.seconds(), 2)
    result["rel_l2_compiled"] = {
        "both": rel_l2(latents["both"], latents["deepcache"]),
        "both_swapped": rel_l2(latents["both_swapped"], latents["deepcache"]),
        "compiled": rel_l2(latents["compiled"], latents["eager"]),
    }
    again = image("eager", 0)
    once = sample(_cached(engine, eager, interval=1), kind, target, steps=steps, seed=0)
    result["max_abs_diff_interval1"] = float((once - again).abs().max())
    result["max_abs_diff_eager_again"] = float((again - latents["eager"]).abs().max())
    result["rel_l2_eager_start"] = rel_l2(start, again)
    result["left_wrong"]["by_all"] = left_wrong(eager)
    partial(result)
    image("both", 0)  # what is hot has its graphs by now
    result |= _times(
        models, image, lambda name: sample(models[name], kind, target, steps=2 * INTERVAL), images
    )
    captures = engine.report(compiled)["captured"]["captures"]
    sample(_cached(engine, compiled, interval=5), kind, target, steps=steps)
    result["captures_by_interval"] = engine.report(compiled)["captured"]["captures"] - captures
    result["builds_by_deepcache"] = len(set(graph_files(store_path)) - files)
    partial(result)
    result["profile"] = {
        name: kernel_times(lambda: sample(models[name], kind, target, steps=6))  # noqa: B023
        for name in ("deepcache", "both")
    }
    result["reports"] = {
        name: {**brief(report), "captured": report["captured"], "deepcache": report["deepcache"]}
        for name, report in ((name, engine.report(made)) for name, made in models.items())
    }
    engine.close()
    return result


def _times(
    models: dict[str, Any],
    image: Callable[[str, int], Any],
    settled: Callable[[str], Any],
    images: int,
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(images):
        for name in models:
            settled(name)
            watch = Stopwatch()
            image(name, turn)
            seconds[name].append(watch.seconds())
    medians = {name: round(statistics.median(values), 4) for name, values in seconds.items()}
    return {
        "ksampler_seconds": medians,
        "each": seconds,
        "speedups": {name: round(medians["eager"] / medians[name], 3) for name in models},
    }


def _cached(engine: Any, model: Any, *, interval: int = INTERVAL) -> Any:
    import_engine()
    from warmgraph_backends.deepcache.run import DeepCacheOptions

    cached, _ = engine.caches.deepcache(model, DeepCacheOptions(interval=interval))
    return cached
