"""A long run of prompts that change at random: nothing wrong, nothing built, no memory lost."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from ..host import Size, apply_controlnet, conditioning, ksampler, load_controlnet, load_lora
from ..measure import torch_used_mib, vram_used_mib
from ..pack import graph_files, open_engine, settle
from .captured import evict, unload
from .common import BUILD_LIMIT_S, Pair, call_errors, partial, sample
from .control import random_hint

STEPS = 4
REL_L2 = 5e-3  # fp16, another order of sums; more is wrong
SIZES = ((1024, 1024), (512, 512), (768, 768), (1152, 896), (832, 1216), (720, 960), (584, 328))
_WARM_PROMPTS = 6


class Prompt(NamedTuple):
    """One prompt: everything that is drawn for it."""

    second_file: bool
    lora: str
    strength: float
    size: Size
    tokens: int
    cfg: float
    controlled: bool
    before: str


def soak(
    *,
    model: str,
    second_model: str,
    loras: dict[str, str],
    control: str,
    kind: str,
    store: str,
    seed: int,
    prompts: int,
    scale: int = 1,
    workers: int = 0,
) -> dict[str, Any]:
    """Run prompts drawn from a seed; ours against eager's calls on the same inputs.

    Ours is the default form with no graphs of fixed sizes: those are built beside the images, and
    here every build counts.

    Args:
        seed: another one is another slice of a longer soak.
        scale: sizes are divided by this (a smoke run).

    Returns:
        {"rows": one per prompt, "failing": those that were wrong, with all that was drawn for them,
        "max_rel_l2", "builds", "vram_mib_per_100_prompts" (of the card, whoever uses it),
        "torch_mib_per_100_prompts" (what PyTorch holds for this process), "captured_mib" (what
        captured calls hold at the end, which a budget bounds), ...}

    Raises:
        RuntimeError: a prompt failed; the text and the partial result have all of it.
    """
    folder = Path(store)
    engine = open_engine(folder, workers=workers)
    pairs = [Pair(engine, Path(path)) for path in (model, second_model)]
    eager_control = load_controlnet(Path(control))
    our_control = engine.compile_controlnet(eager_control, when_missing="wait")
    for pair in pairs:
        pair.settle(kind, Size(SIZES[1][0] // scale, SIZES[1][1] // scale))
    settle(engine, our_control, limit_s=BUILD_LIMIT_S)
    files = set(graph_files(folder))
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    failing: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for number in range(prompts):
        prompt = _draw(draw, scale)
        pair = pairs[prompt.second_file]
        if prompt.before:
            {"unload": unload, "evict": evict}[prompt.before](pair.eager)
        described = {"number": number, **prompt._asdict(), "size": prompt.size._asdict()}
        try:
            found = _run(pair, prompt, kind, loras, eager_control, our_control)
        except Exception as error:
            partial({"seed": seed, "rows": rows[-20:], "failing": [described]})
            text = f"seed {seed}, prompt {described}: {type(error).__name__}: {error}"
            raise RuntimeError(text) from error
        row = {
            **described,
            "rel_l2": max(found),
            "vram_mib": round(vram_used_mib()),
            "torch_mib": round(torch_used_mib()),
        }
        rows.append(row)
        if not row["rel_l2"] <= REL_L2:
            failing.append({**row, "calls": found, "report": _state(pair)})
        result = {"seed": seed, **_summary(rows, failing), **_counts(engine, pairs)}
        result["builds"] = len(set(graph_files(folder)) - files)
        partial({**result, "rows": rows[-20:]})
    engine.close()
    return {**result, "rows": rows}


def _draw(draw: random.Random, scale: int) -> Prompt:
    width, height = draw.choice(SIZES)
    size = Size(width // scale // 8 * 8, height // scale // 8 * 8, draw.choice((1, 1, 1, 2, 3)))
    return Prompt(
        second_file=draw.random() < 0.3,
        lora=draw.choice(("", "", "linear", "conv")),
        strength=draw.choice((1.0, 0.5, -0.7)),
        size=size,
        tokens=draw.choice((77, 77, 154)),
        cfg=draw.choice((7.0, 7.0, 1.0)),
        controlled=draw.random() < 0.25,
        before=draw.choice(("", "", "", "", "", "", "unload", "evict")),
    )


def _run(
    pair: Pair,
    prompt: Prompt,
    kind: str,
    loras: dict[str, str],
    eager_control: Any,
    our_control: Any,
) -> list[float]:
    ours, eager = pair.ours, pair.eager
    if prompt.lora:
        path = Path(loras[prompt.lora])
        ours, eager = (load_lora(thing, path, prompt.strength) for thing in (ours, eager))

    def run(thing: Any, control: Any) -> Any:
        if not prompt.controlled:
            options = {"tokens": prompt.tokens, "cfg": prompt.cfg}
            return sample(thing, kind, prompt.size, steps=STEPS, **options)
        prompts = [conditioning(kind, tokens=prompt.tokens, seed=n) for n in (1, 2)]
        hint = random_hint(prompt.size)
        _, (positive, negative) = apply_controlnet(control, prompts, hint, strength=0.8)
        return ksampler(thing, positive, negative, prompt.size, steps=STEPS, cfg=prompt.cfg)

    return call_errors(
        lambda: run(ours, our_control),
        pair.ours_probe,
        lambda: run(eager, eager_control),
        pair.eager_probe,
    )


def _state(pair: Pair) -> dict[str, Any]:
    """What a report says of how the pair's ours runs now."""
    report = pair.engine.report(pair.ours)
    return {key: report[key] for key in ("regions", "eager", "captured")}


def _summary(rows: list[dict[str, Any]], failing: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "prompts": len(rows),
        "max_rel_l2": max(row["rel_l2"] for row in rows),
        "failing": failing,
        "vram_mib_per_100_prompts": slope([row["vram_mib"] for row in rows[_WARM_PROMPTS:]]),
        "torch_mib_per_100_prompts": slope([row["torch_mib"] for row in rows[_WARM_PROMPTS:]]),
    }


def _counts(engine: Any, pairs: list[Pair]) -> dict[str, Any]:
    reports = [engine.report(pair.ours)["captured"] for pair in pairs]
    return {
        "captured_mib": max(report["vram_bytes"] for report in reports) >> 20,
        "captures": sum(report["captures"] for report in reports),
        "replayed": sum(report["replayed"] for report in reports),
        "not_replayed": [report["not_replayed"] for report in reports],
    }


def slope(values: list[float]) -> float | None:
    """MiB by which the memory in use grows in 100 prompts; None for too few prompts."""
    if len(values) < 20:
        return None
    fit = statistics.linear_regression(range(len(values)), values)
    return round(100 * fit.slope, 1)
