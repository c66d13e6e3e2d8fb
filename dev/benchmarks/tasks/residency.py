"""Right weights wherever they are: resident, streamed, changed by a LoRA; and held once.

The GPU tests (`tests/gpu`) assert on what these return.
"""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..host import Size, conditioning, ksampler, load_lora
from ..measure import MIB, Call, Mode, rel_l2, vram_used_mib
from ..pack import brief, import_engine_package, open_engine
from .common import Pair, errors, load_kind, partial, sample, unserved

_CHUNK_MIB = 256


def equal_to_eager(
    *,
    model: str,
    kind: str,
    store: str,
    sizes: list[list[int]],
    leave_mib: dict[str, int | None],
    steps: int = 3,
    captured: bool = False,
) -> dict[str, Any]:
    """Every UNet call against eager on the same inputs, in phases.

    Args:
        leave_mib: how much VRAM each phase leaves to model and activations; None is all of it.
    """
    engine = open_engine(Path(store), captured=captured)
    pair = Pair(engine, Path(model))
    pair.settle(kind, Size(*sizes[0]))
    phases: dict[str, dict[str, Any]] = {}

    for phase, leave in leave_mib.items():
        before = pair.compiled_calls()
        rows = {}
        with vram_left([pair.ours], leave):
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
            loaded, used = pair.ours.loaded_size(), vram_used_mib()
        report = engine.report(pair.ours)
        unet_calls = sum(len(found) for found in rows.values())
        phases[phase] = {
            "max_rel_l2": max(max(found) for found in rows.values()),
            "rows": rows,
            "compiled_calls": report["calls"]["compiled"] - before,
            "eager_calls": unserved(report, before, unet_calls=unet_calls),
            "loaded_mib": round(loaded / MIB),
            "model_mib": round(pair.ours.model_size() / MIB),
            "vram_used_mib": round(used),
            "report": brief(report),
        }
        partial(phases)
    engine.close()
    return phases


def lora_swaps(
    *,
    model: str,
    kind: str,
    store: str,
    loras: dict[str, str],
    size: list[int],
    leave_mib: int | None,
    captured: bool = False,
) -> dict[str, Any]:
    """Put LoRAs on, change, swap and take them off; each time ours against eager, same inputs.

    Each row also says how far its eager output lies from the first row's without a LoRA (`moved`),
    on the same inputs: a row that did not move could not have found a stale weight.
    """
    engine = open_engine(Path(store), captured=captured)
    pair = Pair(engine, Path(model))
    target = Size(*size)
    pair.settle(kind, target)
    with vram_left([pair.ours], leave_mib):
        rows = _swap(pair, kind, target, loras)
        loaded_mib = round(pair.ours.loaded_size() / MIB)
    compiled = pair.compiled_calls()
    engine.close()
    return {"rows": rows, "compiled_calls": compiled, "loaded_mib": loaded_mib}


def _swap(pair: Pair, kind: str, target: Size, loras: dict[str, str]) -> list[dict[str, Any]]:
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
    return rows


def vram_footprint(
    *, model: str, kind: str, store: str, size: list[int], captured: bool = False
) -> dict[str, Any]:
    """Peak of the driver's used memory during eager runs and during ours, in MiB, weights included.

    The graphs are in the store before this engine opens, so no worker of its own holds memory
    beside it.
    """
    target = Size(*size)
    engine = open_engine(Path(store), captured=captured)
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


def held_pages(*, model: str, kind: str, size: list[int]) -> dict[str, Any]:
    """Want all of the card's memory while a model's pages are held, and once they are let go.

    Returns:
        {"held_mib": of the model after an eager run, "wanted_mib": after all memory was wanted
        while it was held, "wrong": its weights unlike the file's then, "same_again": whether all is
        as it was when it is held a second time, "let_go_mib": after all was wanted when it was not
        held, "held_after": whether it could be held at last}
    """
    import torch

    patcher = load_kind(kind, Path(model))
    sample(patcher, kind, Size(*size), steps=2)
    sources = import_engine_package("weights.fetching")
    weights = sources.ModelWeights(patcher.model, patcher.load_device, torch.float16)
    pages = weights.dynamic
    taken: list[Any] = []

    def want_all() -> None:
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(
                    torch.empty(_CHUNK_MIB * MIB, dtype=torch.uint8, device=patcher.load_device)
                )

    def loaded() -> int:
        return round(patcher.loaded_size() / MIB)

    if (signature := pages.hold()) is None:
        raise RuntimeError("the model must be in dynamic VRAM as a whole")
    result: dict[str, Any] = {"held_mib": loaded()}
    want_all()
    result |= {"wanted_mib": loaded(), "wrong": left_wrong(patcher)}
    pages.release()
    taken.clear()  # comfy-aimdo takes pages at the next look, too, where there is too little room
    empty_caches()
    result["same_again"] = pages.hold() == signature
    pages.release()
    want_all()
    result |= {"let_go_mib": loaded(), "held_after": pages.hold() is not None}
    pages.release()
    return result


@contextlib.contextmanager
def vram_left(patchers: Sequence[Any], leave_mib: int | None) -> Iterator[None]:
    """Unload these models; while this lasts, another process holds the VRAM but for this much.

    Another process, because dynamic VRAM counts what its own allocates. None leaves all as it is.
    """
    if leave_mib is None:
        yield
        return
    import comfy.model_management

    comfy.model_management.unload_all_models()
    for patcher in patchers:
        if patcher.is_dynamic():  # pages of an unloaded model stay until somebody wants the room
            patcher.partially_unload(patcher.offload_device, patcher.model_size())
    empty_caches()
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD_VRAM, str(leave_mib)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        try:
            left = int(holder.stdout.readline() or -1)
            if not 0 <= left <= leave_mib + 64:
                raise RuntimeError(f"{leave_mib} MiB of VRAM must be left, got {left} MiB free")
            yield
        finally:
            holder.stdin.close()
            holder.wait()


_HOLD_VRAM = """
import sys, torch
leave, held = int(sys.argv[1]) << 20, []
while (more := torch.cuda.mem_get_info()[0] - leave) > 32 << 20:
    held.append(torch.empty(min(more, 8 << 30), dtype=torch.uint8, device="cuda"))
print(torch.cuda.mem_get_info()[0] >> 20, flush=True)
sys.stdin.read()
"""


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


def left_wrong(model: Any) -> list[str]:
    """What a run left that another clone's run would meet: weights in dynamic VRAM unlike those of
    the file, and parts of ours or of the host's loading on modules. For a model without patches.
    """
    import torch

    found = []
    for name, module in model.model.diffusion_model.named_modules():
        found += [f"{name}: {kept}" for kept in ("_prefetch", "forward") if kept in vars(module)]
        if getattr(module, "_v_signature", None) is None:
            continue
        for live, file in ((module._v_weight, module.weight), (module._v_bias, module.bias)):
            if live is not None and not torch.equal(live.cpu(), file.to(live.dtype).cpu()):
                found.append(f"{name}: weights unlike the file's")
    return found
