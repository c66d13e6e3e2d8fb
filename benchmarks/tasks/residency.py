"""Right weights wherever they are: resident, streamed, changed by a LoRA; and held once.

The GPU tests (`tests/gpu`) assert on what these return.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from ..host import Size, conditioning, ksampler, load_lora
from ..measure import MIB, Call, Mode, rel_l2, vram_used_mib
from ..pack import brief, open_engine
from .common import Pair, errors, partial, sample, unserved


def equal_to_eager(
    *,
    model: str,
    kind: str,
    store: str,
    sizes: list[list[int]],
    leave_mib: list[int | None],
    steps: int = 3,
) -> dict[str, Any]:
    """Every UNet call against eager on the same inputs, in one phase per entry of `leave_mib`.

    Args:
        leave_mib: None leaves the VRAM alone; a number unloads the model and fills the VRAM up to
            this much, so that the host keeps only a part of the weights there and streams the rest.
    """
    engine = open_engine(Path(store))
    pair = Pair(engine, Path(model))
    pair.settle(kind, Size(*sizes[0]))
    phases = []
    for leave in leave_mib:
        ballast = None if leave is None else fill_vram(leave)
        before = pair.compiled_calls()
        rows = {}
        for width, height, batch in sizes:
            rows[f"{width}x{height} batch {batch}"] = errors(
                pair.ours,
                pair.ours_probe,
                pair.eager,
                pair.eager_probe,
                kind,
                Size(width, height, batch),
                steps=steps,
            )
        report = engine.report(pair.ours)
        unet_calls = sum(len(found) for found in rows.values())
        phases.append(
            {
                "leave_mib": leave,
                "max_rel_l2": max(max(found) for found in rows.values()),
                "rows": rows,
                "compiled_calls": report["calls"]["compiled"] - before,
                "eager_calls": unserved(report, before, unet_calls=unet_calls),
                "loaded_mib": round(pair.ours.loaded_size() / MIB),
                "model_mib": round(pair.ours.model_size() / MIB),
                "report": brief(report),
            }
        )
        del ballast
        partial({"phases": phases})
    engine.close()
    return {"phases": phases}


def lora_swaps(
    *,
    model: str,
    kind: str,
    store: str,
    loras: dict[str, str],
    size: list[int],
    leave_mib: int | None = None,
) -> dict[str, Any]:
    """Put LoRAs on, change, swap and take them off; each time ours against eager, same inputs.

    Each row also says how far its eager output lies from the first row's without a LoRA (`moved`),
    on the same inputs: a row that did not move could not have found a stale weight.
    """
    engine = open_engine(Path(store))
    pair = Pair(engine, Path(model))
    target = Size(*size)
    pair.settle(kind, target)
    ballast = None if leave_mib is None else fill_vram(leave_mib)
    base: list[Call] = []
    rows = []
    swaps = [("", 0.0), ("linear", 1.0), ("linear", 0.5), ("conv", 1.0), ("", 0.0), ("conv", -0.7)]
    for name, strength in swaps:
        ours, eager = pair.ours, pair.eager
        if name:
            ours = load_lora(ours, Path(loras[name]), strength)
            eager = load_lora(eager, Path(loras[name]), strength)
        if not base:
            pair.ours_probe.start(Mode.RECORD)
            sample(ours, kind, target, steps=2)
            base = pair.ours_probe.calls
        # Ours first: it must find this run's weights, not those left by an eager run.
        outputs = {}
        for who, model_, probe in (
            ("ours", ours, pair.ours_probe),
            ("eager", eager, pair.eager_probe),
        ):
            probe.start(Mode.REPLAY, base)
            sample(model_, kind, target, steps=2)
            outputs[who] = [call.output for call in probe.calls]
            probe.start(Mode.OFF)
        rows.append(
            {
                "lora": name,
                "strength": strength,
                "rel_l2": max(map(rel_l2, outputs["ours"], outputs["eager"])),
                "moved": min(
                    rel_l2(output, call.output)
                    for output, call in zip(outputs["eager"], base, strict=True)
                ),
            }
        )
    compiled = pair.compiled_calls()
    del ballast
    engine.close()
    return {"rows": rows, "compiled_calls": compiled}


def vram_footprint(*, model: str, kind: str, store: str, size: list[int]) -> dict[str, Any]:
    """Peak of the driver's used memory during eager runs and during ours, in MiB, weights included.

    The graphs are in the store before this engine opens, so no worker of its own holds memory
    beside it.
    """
    target = Size(*size)
    engine = open_engine(Path(store))
    pair = Pair(engine, Path(model), when_missing="never")
    peaks = {}
    for name, patcher in (("eager", pair.eager), ("ours", pair.ours), ("eager again", pair.eager)):
        sample(patcher, kind, target, steps=2)
        empty_caches()
        peaks[name] = round(_peak_mib(patcher, kind, target))
    report = brief(engine.report(pair.ours))
    model_mib = round(pair.eager.model_size() / MIB)
    engine.close()
    return {"peaks_mib": peaks, "model_mib": model_mib, "report": report}


def fill_vram(leave_mib: int) -> Any:
    """Unload all models and take the GPU's memory but this much; returns what holds it."""
    import comfy.model_management
    import torch

    comfy.model_management.unload_all_models()
    empty_caches()
    free, _ = torch.cuda.mem_get_info()
    take = free - leave_mib * MIB
    if take <= 0:
        raise RuntimeError(f"GPU must have {leave_mib} MiB free, got {free // MIB}")
    return torch.empty(take, dtype=torch.uint8, device="cuda")


def empty_caches() -> None:
    """Give back what the allocator keeps."""
    import comfy.model_management

    gc.collect()
    comfy.model_management.soft_empty_cache(True)


def _peak_mib(model: Any, kind: str, size: Size) -> float:
    peak = 0.0

    def look(step: int) -> None:
        nonlocal peak
        peak = max(peak, vram_used_mib())

    positive, negative = conditioning(kind, seed=1), conditioning(kind, seed=2)
    ksampler(model, positive, negative, size, steps=4, on_step=look)
    return peak
