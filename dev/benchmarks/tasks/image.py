"""The first image: the KSampler node's wall time with builds beside it, and without us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..host import Size
from ..measure import Stopwatch
from ..pack import brief, graph_files, open_engine
from .common import load_kind, sample, start_libraries


def first_image(
    *,
    model: str,
    kind: str,
    store: str,
    size: list[int],
    steps: int,
    ours: bool,
    warm: bool,
    workers: int = 0,
) -> dict[str, Any]:
    """Make one image in a fresh process.

    The checkpoint is loaded, then (with `ours`) Compile Model has run in `background` mode on an
    empty store, then the KSampler node is timed. With `warm` one eager image was made by the same
    process before, the stricter case: what the run then adds is not hidden behind the host's own
    first use of the weights.
    """
    if ours and graph_files(Path(store)):
        raise RuntimeError(f"store must be empty for a first image, got files in {store}")
    loaded = load_kind(kind, Path(model))
    start_libraries(loaded.load_device)
    target = Size(*size)
    if warm:
        sample(loaded, kind, target, steps=steps)
    result: dict[str, Any] = {}
    engine = None
    if ours:
        watch = Stopwatch()
        engine = open_engine(Path(store), workers=workers)
        loaded = engine.compile_model(loaded, when_missing="background")
        result["compile_model_seconds"] = round(watch.seconds(), 3)
    watch = Stopwatch()
    sample(loaded, kind, target, steps=steps)
    result["ksampler_seconds"] = round(watch.seconds(), 3)
    if engine is not None:
        result["report"] = brief(engine.report(loaded))
        result["graphs_at_end"] = len(graph_files(Path(store)))
        engine.close()
    return result
