"""What a user may change after the first build: builds counted, errors taken, two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ..host import Size, load_lora
from ..pack import brief, graph_files, open_engine, settle
from .common import BUILD_LIMIT_S, Pair, errors, partial, sample, unserved

STEPS = 2


class Change(NamedTuple):
    """One change: which file and LoRA, and how the KSampler is set."""

    name: str
    size: Size
    tokens: int = 77
    negative_tokens: int | None = None
    cfg: float = 7.0
    second_file: bool = False
    lora: str = ""
    strength: float = 1.0
    lora_first: bool = False


def changes(
    *,
    model: str,
    second_model: str,
    loras: dict[str, str],
    kind: str,
    store: str,
    part: str,
    scale: int = 1,
    workers: int = 0,
) -> dict[str, Any]:
    """Run one half of the changes.

    Args:
        part: `first`: the first build if the store has none, then changes within one server run;
            `restart`: a fresh process on that store, where nothing at all may be built.
        scale: sizes are divided by this (a smoke run).

    Returns:
        {"first_builds", "builds", "rows": [{"name", "builds", "rel_l2", "eager_calls", ...}]}
    """
    folder = Path(store)
    square = Size(1024 // scale, 1024 // scale)
    files_before = graph_files(folder)
    engine = open_engine(folder, workers=workers)
    pair = Pair(engine, Path(model))
    if part == "first":
        pair.settle(kind, square)
    files_after_first = set(graph_files(folder))
    first_builds = len(files_after_first - set(files_before))
    second: Pair | None = None
    rows: list[dict[str, Any]] = []
    for change in _first(square, scale) if part == "first" else _restart(square, scale):
        if change.second_file and second is None:
            second = Pair(engine, Path(second_model))
        current = second if change.second_file and second is not None else pair
        rows.append(_row(engine, folder, current, change, loras, kind))
        partial({"first_builds": first_builds, "rows": rows})
    report = brief(engine.report(pair.ours))
    engine.close()
    new_files = len(set(graph_files(folder)) - files_after_first)
    return {
        "first_builds": first_builds,
        "builds": max(new_files, sum(row["builds"] for row in rows)),
        "max_rel_l2": max(row["rel_l2"] for row in rows),
        "rows": rows,
        "report": report,
    }


def _first(square: Size, scale: int) -> list[Change]:
    half = Size(square.width // 2, square.height // 2)
    return [
        Change("batch 2", square._replace(batch=2)),
        Change("512x512", half),
        Change("512x512 batch 4", half._replace(batch=4)),
        Change("720x960", Size(720 // scale // 8 * 8, 960 // scale // 8 * 8)),
        Change("1216x832, 154 tokens", Size(1216 // scale, 832 // scale), tokens=154),
        Change("231 tokens, negative 77", square, tokens=231, negative_tokens=77),
        Change("cfg 1", square, cfg=1.0),
        Change("LoRA linear 1.0 after", square, lora="linear"),
        Change("LoRA linear 0.5 after", square, lora="linear", strength=0.5),
        Change("LoRA conv 0.8 before", square, lora="conv", strength=0.8, lora_first=True),
        Change("LoRA off", square),
        Change("other checkpoint", square, second_file=True),
        Change("other checkpoint with LoRA", half, second_file=True, lora="linear"),
    ]


def _restart(square: Size, scale: int) -> list[Change]:
    return [
        Change("restart", square),
        Change("restart, 720x960 batch 3", Size(720 // scale // 8 * 8, 960 // scale // 8 * 8, 3)),
        Change("restart, LoRA conv", square, lora="conv"),
        Change("restart, other checkpoint", square, second_file=True),
    ]


def _row(
    engine: Any, folder: Path, pair: Pair, change: Change, loras: dict[str, str], kind: str
) -> dict[str, Any]:
    """Run one change; builds are counted on the disk and by the report, whichever says more."""
    files = set(graph_files(folder))
    reported = engine.report(pair.ours)["builds"]
    ours, eager = pair.ours, pair.eager
    if change.lora:
        lora = Path(loras[change.lora])
        eager = load_lora(pair.eager, lora, change.strength)
        if change.lora_first:
            patched = load_lora(pair.source, lora, change.strength)
            ours = engine.compile_model(patched, when_missing="wait")
        else:
            ours = load_lora(pair.ours, lora, change.strength)
    options: dict[str, Any] = {
        "steps": STEPS,
        "tokens": change.tokens,
        "negative_tokens": change.negative_tokens,
        "cfg": change.cfg,
    }
    sample(ours, kind, change.size, **options)
    settle(engine, ours, limit_s=BUILD_LIMIT_S)
    before = engine.report(ours)["calls"]["compiled"]
    found = errors(ours, pair.ours_probe, eager, pair.eager_probe, kind, change.size, **options)
    report = engine.report(ours)
    on_disk = len(set(graph_files(folder)) - files)
    said = max(report["builds"], engine.report(pair.ours)["builds"]) - reported
    return {
        "name": change.name,
        "builds": max(on_disk, said),
        "rel_l2": max(found),
        "rel_l2_calls": found,
        "compiled_calls": report["calls"]["compiled"] - before,
        "eager_calls": unserved(report, before, unet_calls=len(found)),
        "eager": report["eager"],
    }
