"""How long a first build takes, how big it is, and how long a fresh process needs to use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..host import Size, load_unet
from ..measure import Stopwatch
from ..pack import brief, graph_files, import_engine, open_engine, settle
from .common import BUILD_LIMIT_S, load_kind, sample, unserved

FIRST_RUNS = 20  # graphs that load beside the first steps are waited for at most this many runs


def cold_build(
    *, model: str, kind: str, store: str, size: list[int], workers: int
) -> dict[str, Any]:
    """Build everything into an empty store, and go on until a step runs all compiled.

    Returns:
        "compile_model_seconds" (the node's own time, it waits for its builds), "build_seconds"
        (until nothing was left to build, first run included if that brought something new),
        "disk_mb" (10**6 bytes, as the files lie there).
    """
    folder = Path(store)
    if graph_files(folder):
        raise RuntimeError(f"store must be empty for a cold build, got files in {folder}")
    loaded = load_kind(kind, Path(model))
    import_engine()
    watch = Stopwatch()
    engine = open_engine(folder, workers=workers)
    ours = engine.compile_model(loaded, when_missing="wait")
    compile_model = watch.seconds()
    built = set(graph_files(folder))
    sample(ours, kind, Size(*size), steps=1)
    settle(engine, ours, limit_s=BUILD_LIMIT_S)
    after_first_run = watch.seconds()
    files = graph_files(folder)
    sample(ours, kind, Size(*size), steps=1)
    report = engine.report(ours)
    engine.close()
    return {
        "workers": workers,
        "compile_model_seconds": round(compile_model, 2),
        "build_seconds": round(compile_model if set(files) == built else after_first_run, 2),
        "first_run_done_seconds": round(after_first_run, 2),
        "graphs": len(files),
        "disk_mb": round(sum(files.values()) / 1e6, 2),
        "files": files,
        "kinds": report["kinds"],
        "report": brief(report),
    }


def bind(
    *, model: str, kind: str, store: str, size: list[int], ours: bool, warm: bool
) -> dict[str, Any]:
    """A fresh process with everything in the store: seconds until the first compiled step is done.

    Imports are excluded, and loading the file. With `warm` one eager image's steps have been made
    by this process before, so that weights are in VRAM and the GPU's libraries are up, and what is
    left is ours; without it the time holds the host's own start too. With `ours` False it is the
    host's eager first step, for comparison.
    """
    loaded = load_unet(Path(model))
    target = Size(*size)
    if warm:
        sample(loaded, kind, target, steps=2)
    import_engine()
    watch = Stopwatch()
    if not ours:
        sample(loaded, kind, target, steps=1)
        return {"seconds": round(watch.seconds(), 3)}
    engine = open_engine(Path(store))
    compiled = engine.compile_model(loaded, when_missing="never")
    node = watch.seconds()
    runs = 0
    while runs < FIRST_RUNS:
        before = engine.report(compiled)["calls"]["compiled"]
        sample(compiled, kind, target, steps=1)
        seconds = watch.seconds()
        runs += 1
        report = engine.report(compiled)
        if unserved(report, before, unet_calls=1) == 0:
            break
    else:
        raise RuntimeError(
            f"a step must run all compiled, got {report['regions']} {report['eager']}"
        )
    # A second run of the same: what the step itself costs, and not the binding.
    watch.restart()
    sample(compiled, kind, target, steps=1)
    again = watch.seconds()
    report = brief(engine.report(compiled))
    engine.close()
    return {
        "seconds": round(seconds, 3),
        "compile_model_seconds": round(node, 3),
        "runs": runs,
        "same_again_seconds": round(again, 3),
        "report": report,
    }
