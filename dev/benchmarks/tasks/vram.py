"""What the GPU's memory holds at most after many sizes: captured calls keep what they need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..host import Size
from ..measure import MIB, vram_used_mib
from ..pack import brief, open_engine
from .common import CAPTURE_STEPS, load_kind, partial, sample
from .residency import empty_caches

_POLL_S = 0.005


def vram_sizes(
    *, model: str, kind: str, store: str, sizes: list[list[int]], ours: bool
) -> dict[str, Any]:
    """Sample every size twice, then take the peak of one more run of the largest one.

    With `ours` each size is captured by then; graphs come out of a full store, so no worker's
    memory is counted with it.

    Args:
        sizes: [width, height] in pixels.

    Returns:
        {"peak": peaks in MiB as the runs before have left memory, "peak_from_empty": those after
        the allocator's cache was emptied; each {"device": the driver's count, "allocated" and
        "reserved": PyTorch's}, "captured"}
    """
    patcher: Any = load_kind(kind, Path(model))
    engine = None
    if ours:
        engine = open_engine(Path(store))
        patcher = engine.compile_model(patcher, when_missing="never")
    for width, height in sizes:
        for _ in range(2):
            sample(patcher, kind, Size(width, height), steps=CAPTURE_STEPS)
    largest = Size(*max(sizes, key=lambda size: size[0] * size[1]))

    def run() -> None:
        sample(patcher, kind, largest, steps=CAPTURE_STEPS)

    result: dict[str, Any] = {"largest": f"{largest.width}x{largest.height}"}
    result["before_mib"] = round(vram_used_mib())
    result["peak"] = peak_mib(run)
    partial(result)
    empty_caches()
    result["peak_from_empty"] = peak_mib(run)
    result["model_mib"] = round(patcher.model_size() / MIB)
    if engine is not None:
        report = engine.report(patcher)
        if report["regions"]["eager"]:
            raise RuntimeError(f"the store must be full, got {report['eager']}")
        result["captured"], result["report"] = report["captured"], brief(report)
        engine.close()
    return result


def peak_mib(run: Callable[[], Any]) -> dict[str, int | None]:
    """Peaks over one run in MiB: the driver's count, looked at all the time, and PyTorch's."""
    import torch

    if not torch.cuda.is_available():
        run()
        return {"device": None, "allocated": None, "reserved": None}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seen = [vram_used_mib()]
    done = threading.Event()

    def look() -> None:
        while not done.wait(_POLL_S):
            seen.append(vram_used_mib())

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        run()
        torch.cuda.synchronize()
    finally:
        done.set()
        watcher.join()
    return {
        "device": round(max(*seen, vram_used_mib())),
        "allocated": round(torch.cuda.max_memory_allocated() / MIB),
        "reserved": round(torch.cuda.max_memory_reserved() / MIB),
    }
