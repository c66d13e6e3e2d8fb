"""The cases of `torch.compile`: the whole model, and every way to use it beside ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .lab import BUILD_WORKERS, NATIVE, OFF, ChildError, Lab

RIVAL_LIMIT_S = 240.0
RIVALS_LIMIT_S = 570.0
Result = dict[str, Any]


def rival(dynamic: bool) -> Callable[[Lab], Result]:
    """A case that compiles the whole model; to be stopped at the limit is a result, no failure."""

    def run(lab: Lab) -> Result:
        model = lab.model("sdxl")
        sizes = [lab.pixels(1024, 1024), lab.pixels(512, 512)]
        quick = {"rounds": 1, "steps": 4} if lab.smoke else {}
        # 30 s more than the limit: the child also boots the host and loads the file.
        try:
            result = lab.run(
                "rival",
                OFF,
                limit_s=RIVAL_LIMIT_S + 30,
                model=model,
                kind=lab.kind("sdxl"),
                sizes=sizes,
                dynamic=dynamic,
                **quick,
            )
        except ChildError as failure:
            if not failure.stopped or lab.left() < 5:
                raise
            result = failure.partial
        done = ", ".join(
            f"{size}: x{row['speedup']} after {row['compile_seconds']} s"
            for size, row in result.get("rows", {}).items()
        )
        lines = [done or f"compile not done: > {RIVAL_LIMIT_S:.0f} s"]
        return {**result, "limit_s": RIVAL_LIMIT_S, "lines": lines}

    return run


def rivals(lab: Lab) -> Result:
    """Ours and three rivals by turns at 1024x1024; what a stopped process had found is a result.

    Under PyTorch's own allocator: the CUDA graphs of `reduce-overhead` know no other.
    """
    quick = {"rounds": 1, "steps": 4} if lab.smoke else {}
    stopped = ""
    try:
        result = lab.run(
            "rivals",
            (*OFF, *NATIVE),
            limit_s=3000 if lab.smoke else RIVALS_LIMIT_S,
            model=lab.model("sdxl"),
            kind=lab.kind("sdxl"),
            store=lab.store("sdxl"),
            size=lab.pixels(1024, 1024),
            workers=lab.workers(BUILD_WORKERS),
            **quick,
        )
    except ChildError as failure:
        if not failure.stopped or "row" not in failure.partial:
            raise
        result, stopped = failure.partial, str(failure)
    names = [name for name in result["row"] if name != "eager"]
    eager = result["row"]["eager"]["unet_ms"].get("median")
    lines = [
        f"eager {eager} ms",
        *(
            f"{name} {result['row'][name]['unet_ms'].get('median')} ms, "
            f"x{result['speedups'][name]}, kernels {result['kernel_ms'].get(name)} ms"
            + (
                f", any shape is x{result['ratios'][name]} of it, compiled in "
                f"{result['compile_seconds'][name]} s"
                if name in result["ratios"]
                else ""
            )
            for name in names
        ),
        *(f"{name} FAILED: {reason[:200]}" for name, reason in result["failed"].items()),
    ]
    if stopped:
        lines.append(f"{stopped} at {result.get('compiling')}")
    return {
        "meaning": "ratios: a rival's UNet call / the any-shape one's, medians, all by turns in "
        "one process; compile_seconds: a rival's first two calls, in which it may find kernels "
        "that an earlier one compiled",
        "partial": stopped or None,
        **result,
        "lines": lines,
    }
