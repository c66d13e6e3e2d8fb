"""The case of VRAM: what many sizes take of it."""

from __future__ import annotations

from typing import Any

from .lab import BUILD_WORKERS, DEFAULT, Lab

SIX_SIZES = ((1024, 1024), (512, 512), (768, 768), (1152, 896), (832, 1216), (1536, 1024))
Result = dict[str, Any]


def vram_six(lab: Lab) -> Result:
    """Six sizes, then the peak of the largest: eager and ours each in a process of its own."""
    lab.fill("sdxl", workers=BUILD_WORKERS)
    runs = {
        name: lab.run(
            "vram_sizes",
            DEFAULT,
            limit_s=600 if lab.smoke else 200,
            model=lab.model("sdxl"),
            kind=lab.kind("sdxl"),
            store=lab.store("sdxl"),
            sizes=[lab.pixels(width, height) for width, height in SIX_SIZES],
            ours=name == "ours",
        )
        for name in ("eager", "ours")
    }
    ratios = {
        state: {
            count: round(runs["ours"][state][count] / eager, 3) if eager else None
            for count, eager in runs["eager"][state].items()
        }
        for state in ("peak", "peak_from_empty")
    }
    captured = runs["ours"]["captured"]
    lines = [
        f"peak of {runs['ours']['largest']}, MiB: "
        + ", ".join(f"{name} {run['peak']}" for name, run in runs.items()),
        f"ratios {ratios}; {captured['signatures']} sizes captured, "
        f"{captured['vram_bytes'] >> 20} MiB, not replayed {captured['not_replayed']}",
    ]
    return {
        "meaning": "peak: of one more run of the largest size after all six, each run until it was "
        "captured; device: the driver's count, polled; allocated, reserved: PyTorch's, in which "
        "what captured calls keep has its place; MiB",
        "peak_ratio": ratios["peak"]["device"],
        "ratios": ratios,
        "captured_bytes": captured["vram_bytes"],
        "runs": runs,
        "lines": lines,
    }
