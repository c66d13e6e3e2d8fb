"""Models on two cards: the host's MultiGPU CFG Split with ours and without, and what it puts on
another card.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from ..host import (
    Size,
    apply_controlnet,
    conditioning,
    ksampler,
    load_controlnet,
    load_lora,
    load_vae,
)
from ..measure import MIB, rel_l2
from ..pack import brief, import_engine, open_engine, settle
from .common import BUILD_LIMIT_S, CAPTURE_STEPS, load_kind, partial, sample
from .control import STRENGTH, random_hint

#: Steps at the beginning of a run that are not timed.
FIRST_STEPS = 4


def two_cards() -> list[Any]:
    """Return two cards; where there is no GPU, as in a narrow run, the processor stands for both.

    Raises:
        RuntimeError: the host sees one card only.
    """
    import comfy.model_management as management
    import torch

    if not torch.cuda.is_available():
        cards = [torch.device("cpu"), torch.device("cpu", 0)]
        management.get_all_torch_devices = lambda exclude_current=False: cards
        return cards
    found: list[Any] = management.get_all_torch_devices()
    if len(found) < 2:
        raise RuntimeError(f"needs two cards in one machine, and ComfyUI sees {len(found)}")
    return found[:2]


def loaded(kind: str, path: Path) -> Any:
    """Load a file as the host's loaders do, which can load it once more for another card."""
    model = load_kind(kind, path)
    if model.cached_patcher_init is None:  # a small twin
        model.cached_patcher_init = (load_kind, (kind, path))
    return model


def split(model: Any) -> Any:
    """As MultiGPU CFG Split."""
    from comfy.multigpu import create_multigpu_deepclones

    return create_multigpu_deepclones(model, 2, reuse_loaded=True)


def multigpu_split(
    *,
    model: str,
    kind: str,
    store: str,
    size: list[int],
    cfg: float,
    steps: int = 20,
    rounds: int = 5,
    workers: int = 0,
) -> dict[str, Any]:
    """Time a sampler's step on one card and on two, without ours and with it, by turns.

    Returns:
        {"step_ms": {name: median}, "quartiles", "speedup" (split alone / with ours), "vs_one" (one
        card with ours / two), "rel_l2" (final latents of both splits), "cards" (of the report),
        "vram_mib" (by card), "report"}
    """
    import torch

    cards, target = two_cards(), Size(*size)
    engine = open_engine(Path(store), workers=workers)
    eager = loaded(kind, Path(model))
    spread = split(eager)
    models = {
        "one": eager,
        "one_ours": engine.compile_model(eager, when_missing="wait"),
        "split": spread,
        "split_ours": engine.compile_model(spread, when_missing="wait"),
    }

    def image(name: str, count: int) -> tuple[Any, list[float]]:
        """The latent, and when each step had ended on all cards."""
        ends: list[float] = []

        def stepped(*_: Any) -> None:
            for card in cards:
                if card.type == "cuda":
                    torch.cuda.synchronize(card)
            ends.append(time.perf_counter())

        return sample(models[name], kind, target, steps=count, cfg=cfg, on_step=stepped), ends

    latents = {}
    for name in models:
        for _ in range(3 if "ours" in name else 1):
            latents[name], _ = image(name, max(CAPTURE_STEPS, FIRST_STEPS))
            if "ours" in name:
                settle(engine, models[name], limit_s=BUILD_LIMIT_S)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name in models:
            image(name, FIRST_STEPS)  # the host loads a model anew after another clone's turn
            _, ends = image(name, steps)
            taken = [after - before for before, after in itertools.pairwise(ends)]
            seconds[name] += taken[FIRST_STEPS:]
        partial({"seconds": seconds})
    medians = {name: round(1000 * statistics.median(each), 3) for name, each in seconds.items()}
    quartiles = {
        name: [round(1000 * q, 3) for q in statistics.quantiles(each, n=4)[::2]]
        for name, each in seconds.items()
    }
    report = engine.report(models["split_ours"])
    result = {
        "step_ms": medians,
        "quartiles": quartiles,
        "speedup": round(medians["split"] / medians["split_ours"], 3),
        "vs_one": round(medians["one_ours"] / medians["split_ours"], 3),
        "split_alone_vs_one": round(medians["one"] / medians["split"], 3),
        "rel_l2": rel_l2(latents["split_ours"], latents["split"]),
        "cards": [(each["device"], each["regions"], each["ms"]) for each in report["cards"]],
        "vram_mib": {str(card): _used_mib(card) for card in cards},
        "captured": report["captured"],
        "report": brief(report),
    }
    engine.close()
    return result


# --- for tests ------------------------------------------------------------------------------------


def cards_split(
    *,
    model: str,
    kind: str,
    store: str,
    sizes: list[list[int]],
    loras: dict[str, str],
    workers: int = 0,
) -> dict[str, Any]:
    """Run a split with ours through what people do with it, each beside the same without ours.

    Returns:
        {"rows": [{"name", "rel_l2", "compiled", "total", "eager_calls", "cards", "builds"}],
        "sorts" (names of both cards), "errors", "deepcache", "asked" (captured bytes by card before
        and after the host asked the second one for memory), "second_mib" (its use: before, under
        the split, and once a workflow ran without it)}
    """
    import comfy.model_management as management
    import torch

    cards = two_cards()
    first, second = cards
    engine = open_engine(Path(store), workers=workers)
    eager = loaded(kind, Path(model))
    sample(eager, kind, Size(*sizes[0][:2]), steps=1)
    found: dict[str, Any] = {"second_mib": {"before": _used_mib(second)}, "rows": []}
    spread = split(eager)
    models = {
        "before": split(engine.compile_model(eager, when_missing="wait")),
        "behind": engine.compile_model(spread, when_missing="wait"),
    }
    for name, ours in models.items():
        for size in sizes:
            found["rows"].append(
                {"name": f"{name} {size}", **_compared(engine, kind, spread, ours, Size(*size))}
            )
            partial(found)
    size = Size(*sizes[0])
    for form, path in loras.items():
        plain, ours = (load_lora(each, Path(path), 0.8) for each in (spread, models["behind"]))
        row = _compared(engine, kind, plain, ours, size)
        found["rows"].append({"name": f"LoRA {form}", **row})
    found["errors"] = _errors(models["behind"], kind, size)
    row = _compared(engine, kind, spread, models["behind"], size)
    found["rows"].append({"name": "after errors", **row})
    partial(found)
    found["deepcache"] = _deepcache(engine, models["behind"], kind, size)
    found["asked"] = {"before": _captured(engine)}
    management.free_memory(1e30, second)
    found["asked"]["after"] = _captured(engine)
    row = _compared(engine, kind, spread, models["behind"], size)
    found["rows"].append({"name": "after the host took memory back", **row})
    found["second_mib"]["split"] = _used_mib(second)
    found["sorts"] = [_name(card) for card in cards]
    partial(found)
    del spread, models, ours, plain
    ours = engine.compile_model(eager, when_missing="wait")
    management.unload_all_models()
    found["rows"].append({"name": "one card", **_compared(engine, kind, eager, ours, size)})
    gc.collect()
    management.soft_empty_cache()
    if torch.cuda.is_available():
        torch.cuda.synchronize(first)
    found["second_mib"]["after"] = _used_mib(second)
    found["cards_after"] = engine.report(ours)["cards"]
    engine.close()
    return found


def cards_apart(
    *,
    model: str,
    kind: str,
    store: str,
    vae: str,
    vae_kind: str,
    vae_store: str,
    size: list[int],
    control: str = "",
    workers: int = 0,
) -> dict[str, Any]:
    """Run what the host's nodes put on the second card: a model, before and behind the node, a VAE,
    and a ControlNet under the split.

    Args:
        control: a file of a ControlNet; "": none. With dynamic VRAM the host's own copy of one for
            another card frees memory of the first one's, which ends the process.

    Returns:
        {"rows": as of `cards_split`, without "cards" for the VAE}
    """
    import torch
    from comfy_extras.nodes_multigpu import _retarget_patcher

    _, second = two_cards()
    engine = open_engine(Path(store), workers=workers)
    eager, target, rows = loaded(kind, Path(model)), Size(*size), []
    moved = _retarget_patcher(eager.clone(), second, torch.device("cpu"))
    behind = engine.compile_model(moved, when_missing="wait")
    rows.append({"name": "behind", **_compared(engine, kind, moved, behind, target)})
    before = engine.compile_model(eager, when_missing="wait")
    before = _retarget_patcher(before.clone(), second, torch.device("cpu"))
    rows.append({"name": "before", **_compared(engine, kind, moved, before, target)})
    both = engine.compile_model(eager, when_missing="wait")
    for name, plain, ours in (("first", eager, both), ("second", moved, behind)):
        rows.append({"name": f"by turns, {name}", **_compared(engine, kind, plain, ours, target)})
        partial({"rows": rows})
    if control:
        row = _controlled(engine, eager, kind, Path(control), target)
        rows.append({"name": "ControlNet", **row})
        partial({"rows": rows})
    engine.close()
    engine = open_engine(Path(vae_store), workers=workers)
    plain_vae = load_vae(Path(vae), vae_kind)
    plain_vae.patcher = plain_vae.patcher.clone()
    plain_vae.patcher.load_device = plain_vae.device = second
    ours_vae = engine.compile_vae(plain_vae, when_missing="wait")
    latent = torch.randn(1, 4, target.height // 8, target.width // 8)
    found = rel_l2(ours_vae.decode(latent).cpu(), plain_vae.decode(latent).cpu())
    report = engine.report(ours_vae)
    rows.append({"name": "VAE", "rel_l2": found, **_counted(report, report)})
    engine.close()
    return {"rows": rows}


def _compared(engine: Any, kind: str, plain: Any, ours: Any, size: Size) -> dict[str, Any]:
    """Final latents of a few steps of ours, often enough to be captured, beside the host's own."""
    expected = sample(plain, kind, size, steps=CAPTURE_STEPS)
    before = engine.report(ours)
    for _ in range(2):
        image = sample(ours, kind, size, steps=CAPTURE_STEPS)
    return {"rel_l2": rel_l2(image, expected), **_counted(before, engine.report(ours))}


def _counted(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        "compiled": after["regions"]["compiled"],
        "total": after["regions"]["total"],
        "eager": after["eager"][:3],
        "eager_calls": after["calls"]["eager"] - before["calls"]["eager"],
        "builds": after["builds"] - before["builds"],
        "replayed": after["captured"]["replayed"] - before["captured"]["replayed"],
        "not_replayed": after["captured"]["not_replayed"],
        "cards": [(each["device"], each["regions"], each["replayed"]) for each in after["cards"]],
        "notes": after["notes"],
    }


def _errors(model: Any, kind: str, size: Size) -> list[str]:
    """Fail a step on each card, by an error and by a cancel; the names of what came out."""
    from comfy.model_management import InterruptProcessingException
    from comfy.patcher_extension import WrappersMP

    root, names = model.model.diffusion_model, []
    for error in (ValueError("theirs"), InterruptProcessingException()):
        for is_first in (True, False):

            def fail(
                executor: Any,
                *args: Any,
                error: BaseException = error,
                is_first: bool = is_first,
                **named: Any,
            ) -> Any:
                if (executor.class_obj is root) is is_first:
                    raise error
                return executor(*args, **named)

            clone = model.clone()
            clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "somebody", fail)
            try:
                sample(clone, kind, size, steps=2)
            except (Exception, InterruptProcessingException) as caught:
                names.append(type(caught).__name__)
    return names


def _deepcache(engine: Any, model: Any, kind: str, size: Size) -> dict[str, Any]:
    import_engine()
    from warmgraph_backends.deepcache.run import DeepCacheOptions

    cached, _ = engine.caches.deepcache(model, DeepCacheOptions(interval=3))
    image = sample(cached, kind, size, steps=CAPTURE_STEPS)
    expected = sample(model, kind, size, steps=CAPTURE_STEPS)
    return {
        "problem": engine.report(cached)["deepcache"]["problem"],
        "rel_l2": rel_l2(image, expected),
    }


def _controlled(engine: Any, eager: Any, kind: str, path: Path, size: Size) -> dict[str, Any]:
    """A split under a ControlNet, both with ours, beside both without."""
    spread = split(eager)
    ours = engine.compile_model(spread, when_missing="wait")
    net = load_controlnet(path)
    our_net = engine.compile_controlnet(load_controlnet(path), when_missing="wait")
    prompts = [conditioning(kind, seed=seed) for seed in (1, 2)]
    hint = random_hint(size)

    def image(model: Any, applied: Any) -> Any:
        positive, negative = applied
        return ksampler(model, positive, negative, size, steps=CAPTURE_STEPS)

    plain, controlled = (
        apply_controlnet(each, prompts, hint, strength=STRENGTH)[1] for each in (net, our_net)
    )
    expected = image(spread, plain)
    before = engine.report(our_net)
    found = [image(ours, controlled) for _ in range(2)]
    return {"rel_l2": rel_l2(found[-1], expected), **_counted(before, engine.report(our_net))}


def _captured(engine: Any) -> dict[str, int]:
    memory = engine._captured.by_device
    return {str(device): held for device, held in memory.items()}


def _name(card: Any) -> str:
    import torch

    return torch.cuda.get_device_name(card) if card.type == "cuda" else "the processor"


def _used_mib(card: Any) -> float:
    """What this process's tensors and captured graphs hold of a card's memory; 0 of the processor.

    Others may be on that card, so the driver's count of what is free says nothing.
    """
    import torch

    from warmgraph_backends.cuda_graphs import driver

    if card.type != "cuda":
        return 0.0
    held = torch.cuda.memory_reserved(card)
    if driver.is_driver_allocator():
        held += driver.reserved_bytes(card)
    return round(held / MIB, 1)
