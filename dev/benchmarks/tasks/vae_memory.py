"""What decodes take of the VRAM after many sizes, and what a new size costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..host import load_vae
from ..measure import MIB, Stopwatch
from ..pack import brief, graph_files, open_engine
from .common import partial
from .residency import empty_caches
from .vae import WARM_SIDE, served_calls, settle_vae, vae_input


def vae_memory(
    *,
    model: str,
    kind: str,
    store: str,
    sizes: list[list[int]],
    peaks: list[list[int]],
    ours: bool,
) -> dict[str, Any]:
    """Decode many sizes in one process, each twice, then take the peak of single decodes.

    With `ours` the graphs come out of a full store and nothing is built. One size that is not
    among them is decoded before, so that none pays for the process's start.

    Args:
        sizes: [width, height, batch] in pixels.
        peaks: [width, height] of the decodes whose peak is taken.

    Returns:
        {"sizes": {"WxH batch B": {"first", "second", "extra"}} in seconds, "peaks": {"WxH":
        {"allocated_mib", "reserved_mib"}} by PyTorch's counters (None without a GPU; weights that
        dynamic VRAM holds are not among them)}
    """
    vae = load_vae(Path(model), kind)
    folder = Path(store)
    before = set(graph_files(folder))
    result: dict[str, Any] = {"dtype": str(vae.vae_dtype), "sizes": {}, "peaks": {}}
    engine = None
    watch = Stopwatch()
    if ours:
        engine = open_engine(folder)
        vae = engine.compile_vae(vae, when_missing="never")
        result["region_calls"] = counts = settle_vae(engine, vae)
        compiled = served_calls(engine, vae)
    else:
        for _ in range(2):
            vae.decode(vae_input(vae, "decode", WARM_SIDE, WARM_SIDE))
    result["start_seconds"] = round(watch.seconds(), 3)
    for width, height, batch in sizes:
        latent = vae_input(vae, "decode", width, height, batch)
        seconds = []
        for _ in range(2):
            watch.restart()
            vae.decode(latent)
            seconds.append(watch.seconds())
        result["sizes"][f"{width}x{height} batch {batch}"] = {
            "first": round(seconds[0], 4),
            "second": round(seconds[1], 4),
            "extra": round(seconds[0] - seconds[1], 4),
        }
    result["after_sizes"] = _allocator()
    for width, height in peaks:
        result["peaks"][f"{width}x{height}"] = _peak(vae, width, height)
        partial(result)
    if engine is not None:
        decodes = 2 * len(sizes) + len(peaks)
        result["eager_calls"] = counts["decode"] * decodes - (served_calls(engine, vae) - compiled)
        result["builds"] = len(set(graph_files(folder)) - before)
        result["report"] = brief(engine.report(vae))
        engine.close()
    return result


def _peak(vae: Any, width: int, height: int) -> dict[str, Any]:
    """Peak of the allocator's counters over one decode, from an emptied cache on."""
    import torch

    latent = vae_input(vae, "decode", width, height)
    empty_caches()
    if not torch.cuda.is_available():
        vae.decode(latent)
        return {"allocated_mib": None, "reserved_mib": None}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = torch.cuda.memory_allocated()
    vae.decode(latent)
    torch.cuda.synchronize()
    return {
        "allocated_mib": round(torch.cuda.max_memory_allocated() / MIB, 1),
        "reserved_mib": round(torch.cuda.max_memory_reserved() / MIB, 1),
        "allocated_before_mib": round(begin / MIB, 1),
    }


def _allocator() -> dict[str, Any]:
    """What PyTorch holds now."""
    import torch

    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    return {
        "allocated_mib": round(torch.cuda.memory_allocated() / MIB, 1),
        "reserved_mib": round(torch.cuda.memory_reserved() / MIB, 1),
    }
