"""Whole calls replayed from CUDA graphs: the same bits as eager, through every change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..host import Size, load_lora, load_unet
from ..pack import open_engine
from .common import partial, sample
from .residency import empty_caches


def exact(
    *,
    model: str,
    kind: str,
    store: str,
    sizes: list[list[int]],
    loras: dict[str, str],
    steps: int = 6,
    form: str = "exact",
    compiler: bool = True,
) -> dict[str, Any]:
    """Final latents of the exact form against eager's, bit for bit, through every change.

    Args:
        sizes: [width, height, batch] in pixels; the first serves the other changes.
        compiler: False takes the function that compiles away from this process's torch.

    Returns:
        {"rows": [{"name", "max_abs_diff", "replayed"}], "max_abs_diff", "captured", "notes"}
    """
    import torch._inductor

    if not compiler:
        del torch._inductor.standalone_compile
    engine = open_engine(Path(store))
    eager = load_unet(Path(model))
    ours = engine.compile_model(eager, form=form)
    rows: list[dict[str, Any]] = []

    def compare(
        name: str,
        size: Size,
        change: Callable[[Any], Any] = lambda m: m,
        first: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """`first` comes before each of the two runs: the host's own first sigmas after a load are
        computed elsewhere than later ones.
        """
        first(eager)
        expected = sample(change(eager), kind, size, steps=steps)
        before = engine.report(ours)["captured"]["replayed"]
        first(ours)
        found = sample(change(ours), kind, size, steps=steps)
        report = engine.report(ours)["captured"]
        rows.append(
            {
                "name": name,
                "max_abs_diff": float((found - expected).abs().max()),
                "finite": bool(found.isfinite().all()),
                "replayed": report["replayed"] - before,
                "not_replayed": report["not_replayed"],
                "pinned_pages": _pinned_pages(ours),
            }
        )
        partial({"rows": rows})

    sample(eager, kind, Size(*sizes[0]), steps=1)
    for width, height, batch in sizes:
        compare(f"{width}x{height} batch {batch}", Size(width, height, batch))
    first = Size(*sizes[0])
    compare("first size again", first)
    for name, strength in (("linear", 1.0), ("linear", 0.5), ("conv", 0.8)):
        path = Path(loras[name])
        compare(f"LoRA {name} {strength}", first, lambda m: load_lora(m, path, strength))  # noqa: B023
    compare("LoRA off", first)
    compare("after everything was unloaded", first, first=unload)
    compare("again", first)
    compare("after pages were evicted", first, first=evict)
    result = {
        "rows": rows,
        "max_abs_diff": max(row["max_abs_diff"] for row in rows),
        "captured": engine.report(ours)["captured"],
        "notes": engine.report(ours)["notes"],
    }
    engine.close()
    return result


def _pinned_pages(model: Any) -> int:
    """Pages of dynamic VRAM that the host could not free now."""
    ranges = getattr(model.model, "dynamic_vbars", {}).values()
    return sum(bool(flags & 2) for pages in ranges for flags in pages.get_residency())


def failures(*, model: str, kind: str, store: str, size: list[int], waits: bool) -> dict[str, Any]:
    """Calls that cannot be captured, one sort after the other, and a good one at the end.

    The sorts: the GPU is waited for in the middle of the forward; there is no memory in the middle
    of it; another node's code, wrapper and patch take part. Before the end one whose options hold
    what no model reads.

    Args:
        waits: try the first sort, too: under `cudaMallocAsync` it would end the process.
    """
    from comfy.ldm.modules.diffusionmodules import openaimodel

    engine = open_engine(Path(store))
    eager = load_unet(Path(model))
    target = Size(*size)
    expected = sample(eager, kind, target, steps=5)
    expected = sample(eager, kind, target, steps=5)
    result: dict[str, Any] = {"rows": {}}

    def run(change: Callable[[Any], Any] = lambda m: m) -> dict[str, Any]:
        ours = engine.compile_model(eager, form="exact")
        found = sample(change(ours), kind, target, steps=5)
        report = engine.report(ours)["captured"]
        return {
            "max_abs_diff": float((found - expected).abs().max()),
            "replayed": report["replayed"],
            "not_replayed": " / ".join(report["not_replayed"]),
        }

    for name, (harm, reason) in _HARMS.items():
        if name == _WAITS and not waits:
            continue
        # A function of the host's module: no class and no instance is marked as patched.
        before = openaimodel.timestep_embedding
        openaimodel.timestep_embedding = harm(before)
        try:
            result["rows"][name] = {**run(), "reason": reason}
        finally:
            openaimodel.timestep_embedding = before
        partial(result)
    openaimodel.timestep_embedding = lambda *a, **k: before(*a, **k)
    try:
        replaced = "code of another package takes part"
        result["rows"]["replaced function"] = {**run(), "reason": replaced}
    finally:
        openaimodel.timestep_embedding = before
    forward = openaimodel.UNetModel._forward
    openaimodel.UNetModel._forward = lambda self, *a, **k: forward(self, *a, **k)
    try:
        result["rows"]["replaced code"] = {**run(), "reason": "another node replaces the code"}
    finally:
        openaimodel.UNetModel._forward = forward
    for name, (change, reason) in _CHANGES.items():
        result["rows"][name] = {**run(change), "reason": reason}
    result["options"] = run(_with_options)
    result["afterwards"] = run()
    engine.close()
    return result


def _with_options(model: Any) -> Any:
    """What a sampler's pack leaves in each call's options for models of its own: an object, a
    number and a tensor of each evaluation.
    """
    from comfy.patcher_extension import WrappersMP

    clone, rows = model.clone(), list[int]()

    def around(executor: Any, model: Any, conds: Any, x: Any, t: Any, options: Any) -> Any:
        rows.append(len(rows))
        left = {"of_a_pack": object(), "of_a_packs_row": len(rows), "of_a_packs_start": x.cpu()}
        options.setdefault("transformer_options", {}).update(left)
        return executor(model, conds, x, t, options)

    clone.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "of_a_pack", around)
    return clone


def _waits(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)  # by its name it is the host's own
    def waiting(timesteps: Any, *args: Any, **kwargs: Any) -> Any:
        if float((timesteps + 0)[0]) < 0:
            raise RuntimeError("a timestep must not be negative")
        return forward(timesteps, *args, **kwargs)

    return waiting


def _runs_out(forward: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(forward)
    def starving(timesteps: Any, *args: Any, **kwargs: Any) -> Any:
        made = timesteps + 0  # memory of the capture that the traceback holds
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError(f"none left for {made.shape}")
        return forward(timesteps, *args, **kwargs)

    return starving


def _wrapped(model: Any) -> Any:
    from comfy.patcher_extension import WrappersMP

    clone = model.clone()
    clone.add_wrapper_with_key(
        WrappersMP.DIFFUSION_MODEL, "another", lambda executor, *a, **k: executor(*a, **k)
    )
    return clone


def _patched(model: Any) -> Any:
    clone = model.clone()
    clone.set_model_input_block_patch(lambda h, options: h)
    return clone


_WAITS = "waits for the GPU"
_HARMS = {
    _WAITS: (_waits, "it cannot be captured"),
    "runs out of memory": (_runs_out, "out of memory while it was captured"),
}
_CHANGES = {
    "another wrapper within": (_wrapped, "another node wraps the model's own call"),
    "a patch": (_patched, "patches may do something else"),
}


def unload(model: Any) -> None:
    """Have the host unload everything, and take what stays in dynamic VRAM away, too."""
    import comfy.model_management

    comfy.model_management.unload_all_models()
    evict(model)


def evict(model: Any) -> None:
    """Take the pages of a model in dynamic VRAM away, as another one's need would."""
    if model.is_dynamic():
        model.partially_unload(model.offload_device, 1e32)
    empty_caches()
