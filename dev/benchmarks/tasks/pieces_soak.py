"""A long run of prompts whose blocks are replayed one by one, beside all that changes: the bits of
calls, nothing built, no memory lost.
"""

from __future__ import annotations

import functools
import random
import threading
from pathlib import Path
from typing import Any, NamedTuple

from ..measure import flat, vram_used_mib
from ..pack import graph_files, open_engine, settle, settle_second_graphs
from ..transformers import load, sample, with_lora
from .captured import unload
from .common import BUILD_LIMIT_S, partial
from .pieces import Attention, attends, overridden
from .soak import slope

SIZES = ((512, 512), (768, 512), (584, 328), (1024, 512))
_WARM_PROMPTS = 20


class Prompt(NamedTuple):
    """One prompt: everything that is drawn for it."""

    model: int
    size: tuple[int, ...]
    steps: int
    override: str
    lora: float
    before: str
    cancelled: bool


def pieces_soak(
    *, names: list[str], store: str, seed: int, prompts: int, scale: int = 1, workers: int = 0
) -> dict[str, Any]:
    """Run prompts drawn from a seed, each with its blocks replayed, and by calls alone.

    Args:
        names: of the models, which are small ones (`transformer_kinds.SMALL`).
        scale: sizes are divided by this (a smoke run).

    Returns:
        {"prompts", "failing": those whose last latents differ at all, "max_abs_diff", "builds",
        "replayed": calls of blocks, "cuts": by reason, "cancelled", "vram_mib_per_100_prompts"}

    Raises:
        RuntimeError: a prompt failed; the text has all that was drawn for it.
    """
    import torch

    engine = open_engine(Path(store), workers=workers)
    from warmgraph_backends.cuda_graphs import pieces as room

    share = room.IDLE_SHARE
    loaded = [load(name, Path()) for name in names]
    models = [engine.compile_model(model, when_missing="wait") for model in loaded]
    for name, model in zip(names, models, strict=True):
        sample(name, model, [*pixels(SIZES[0], scale), 1], steps=1)
        settle(engine, model, limit_s=BUILD_LIMIT_S)
        settle_second_graphs(engine, model, limit_s=BUILD_LIMIT_S)
    files = set(graph_files(Path(store)))
    attention, draw = Attention(), random.Random(seed)
    failing: list[dict[str, Any]] = []
    vram: list[float] = []
    worst, cancelled = 0.0, 0
    result: dict[str, Any] = {}
    try:
        for number in range(prompts):
            prompt = _draw(draw, names, scale)
            name, model = names[prompt.model], models[prompt.model]
            if prompt.lora:
                model = with_lora(model, "LoraLoaderModelOnly", rank=4, strength=prompt.lora)
            model = overridden(
                model.clone(),
                attention if prompt.override == "unknown" else attends,
                prompt.override,
            )
            if prompt.before == "unload":
                unload(model)
            run = functools.partial(
                sample, name, model, list(prompt.size), steps=prompt.steps, seed=number
            )
            try:
                room.IDLE_SHARE = share
                if prompt.cancelled:
                    cancelled += _cancelled(run)
                ours = run()
                room.IDLE_SHARE = float("inf")
                models[prompt.model].get_attachment("warmgraph").scope.give_back()
                calls = run()
            except Exception as error:
                text = f"seed {seed}, prompt {number} {prompt}: {type(error).__name__}: {error}"
                raise RuntimeError(text) from error
            difference = float((flat(ours) - flat(calls)).abs().max())
            worst = max(worst, difference)
            if not (difference == 0 and torch.isfinite(flat(ours)).all()):
                failing.append({"number": number, **prompt._asdict(), "max_abs_diff": difference})
            vram.append(round(vram_used_mib()))
            captured = [engine.report(each)["captured"]["pieces"] for each in models]
            result = {
                "seed": seed,
                "prompts": number + 1,
                "failing": failing,
                "max_abs_diff": worst,
                "cancelled": cancelled,
                "replayed": sum(each["replayed"] for each in captured),
                "cuts": [each["cuts"] for each in captured],
                "refused": [each["refused"] for each in captured],
                "builds": len(set(graph_files(Path(store))) - files),
                "vram_mib_per_100_prompts": slope(vram[_WARM_PROMPTS:]),
            }
            partial(result)
    finally:
        room.IDLE_SHARE = share
    engine.close()
    return result


def pixels(size: tuple[int, int], scale: int) -> list[int]:
    """Return the sides of an image in a run or, divided by a scale, in a smoke run."""
    return [side // scale // 32 * 32 for side in size]


def _draw(draw: random.Random, names: list[str], scale: int) -> Prompt:
    model = draw.randrange(len(names))
    size = [*pixels(draw.choice(SIZES), scale), 1]
    return Prompt(
        model=model,
        size=(*size, draw.choice((1, 1, 2))),
        steps=draw.choice((3, 5, 8)),
        override=draw.choice(("", "unknown", "unknown", "known")),
        lora=draw.choice((0.0, 0.0, 0.7, -0.4)),
        before=draw.choice(("", "", "", "", "", "unload")),
        cancelled=draw.random() < 0.1,
    )


def _cancelled(run: Any) -> bool:
    """Whether a run was cancelled before it came to its end."""
    from comfy import model_management

    timer = threading.Timer(0.02, model_management.interrupt_current_processing)
    timer.start()
    try:
        run()
    except model_management.InterruptProcessingException:
        return True
    finally:
        timer.cancel()
        timer.join()
        model_management.interrupt_current_processing(False)
    return False
