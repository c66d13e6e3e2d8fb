"""Models whose blocks' calls are learned from a step: how fast, beside eager and beside what was
written for a family; and whether they stay right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from ..measure import Mode, Probe, Stopwatch, flat, rel_l2, summary
from ..pack import POLL_S, brief, graph_files, open_engine, settle, settle_second_graphs
from ..transformer_kinds import SMALL, TRANSFORMERS
from ..transformers import load, sample, with_lora
from .captured import unload
from .common import BUILD_LIMIT_S, partial
from .keeping import KINDS, counted, reads_option, root_keeps
from .pieces import Attention, attends, overridden
from .pieces_soak import SIZES, pixels

WARM_STEPS = 2
#: Runs until all is served: one is watched, one is compared as a whole.
FIRST_RUNS = 4
#: Relative L2 error of a latent, of small models in float32; up to 4e-7 was seen.
MOST = 1e-5


def learned(
    *,
    name: str,
    path: str,
    store: str,
    size: list[int],
    written: bool = False,
    rounds: int = 3,
    steps: int = 8,
    workers: int = 0,
) -> dict[str, Any]:
    """Time a model's steps by turns: eager, by what is learned, and by what is written.

    Args:
        path: of its file, written now if it is not there.
        size: as `transformers.sample` takes it.
        written: whether a family describes it, which takes a turn of its own; what is learned does
            without.

    Returns:
        {"watched_ms": of the run's first step, which is watched, "after_ms" of the next ones,
        "eager_ms" of such a run's steps without us, "ready_seconds", "builds_after_first",
        "report", "step_ms": {form: times}, "speedup", "vs_written", "rel_l2"}
    """
    loaded = load(name, Path(path))
    engine = open_engine(Path(store), workers=workers)
    run = functools.partial(sample, name)
    forms = ("eager", "learned", *(("written",) if written else ()))
    probes = {form: Probe() for form in forms}
    models = {form: probe.attach(loaded, records=False) for form, probe in probes.items()}
    result: dict[str, Any] = {}
    for _ in range(2):
        probes["eager"].start(Mode.TIME)
        run(models["eager"], size, steps=WARM_STEPS + 2)
    result["eager_ms"] = probes["eager"].step_milliseconds(skip=0)

    def described_by(form: str) -> AbstractContextManager[None]:
        return _undescribed(name) if written and form == "learned" else contextlib.nullcontext()

    watch = Stopwatch()
    with described_by("learned"):
        models["learned"] = engine.compile_model(models["learned"], when_missing="background")
        probes["learned"].start(Mode.TIME)
        run(models["learned"], size, steps=WARM_STEPS + 2)
        times = probes["learned"].step_milliseconds(skip=0)
        result["watched_ms"], result["after_ms"] = times[0], times[1:]
        for _ in range(FIRST_RUNS):
            _settle(engine, models["learned"])
            run(models["learned"], size, steps=2)
        settle_second_graphs(engine, models["learned"], limit_s=BUILD_LIMIT_S)
    result["ready_seconds"] = round(watch.seconds(), 1)
    result["report"] = brief(engine.report(models["learned"]))
    partial(result)
    if written:
        models["written"] = engine.compile_model(models["written"], when_missing="wait")
        run(models["written"], size, steps=1)
        settle(engine, models["written"], limit_s=BUILD_LIMIT_S)
        settle_second_graphs(engine, models["written"], limit_s=BUILD_LIMIT_S)
    files = set(graph_files(Path(store)))
    calls: dict[str, list[float]] = {form: [] for form in forms}
    for turn in range(-1, rounds):  # the first one records what is replayed
        for form in forms:
            with described_by(form):
                probes[form].start(Mode.TIME)
                run(models[form], size, steps=WARM_STEPS + steps, seed=max(turn, 0))
                if turn >= 0:
                    calls[form] += probes[form].step_milliseconds(skip=WARM_STEPS)
                probes[form].start(Mode.OFF)
    medians = {form: statistics.median(times) for form, times in calls.items()}
    result["step_ms"] = {form: summary(times) for form, times in calls.items()}
    result["speedup"] = round(medians["eager"] / medians["learned"], 3)
    if written:
        result["vs_written"] = round(medians["written"] / medians["learned"], 3)
    latents = {}
    for form in ("eager", "learned"):
        with described_by(form):
            latents[form] = run(models[form], size, steps=1)
    result["rel_l2"] = rel_l2(flat(latents["learned"]), flat(latents["eager"]))
    reports = {form: engine.report(models[form]) for form in forms if form != "eager"}
    result["report"] = brief(reports["learned"])
    result["captured"] = {form: report["captured"] for form, report in reports.items()}
    result["builds_after_first"] = len(set(graph_files(Path(store))) - files)
    engine.close()
    return result


def serve_all(engine: Any, name: str, model: Any, size: list[int]) -> None:
    """Run a model until all that can be learned of it is, and is built."""
    for _ in range(FIRST_RUNS):
        sample(name, model, size, steps=2)
        _settle(engine, model)
    settle_second_graphs(engine, model, limit_s=BUILD_LIMIT_S)


def _settle(engine: Any, model: Any) -> None:
    """Wait for what is learned, then for what is built."""
    begin = time.perf_counter()
    while (progress := engine._builder.progress()).done < progress.total:
        if time.perf_counter() - begin > BUILD_LIMIT_S:
            raise TimeoutError(f"workers must have ended within {BUILD_LIMIT_S} s")
        time.sleep(POLL_S)
    settle(engine, model, limit_s=BUILD_LIMIT_S)


@contextlib.contextmanager
def _undescribed(name: str) -> Iterator[None]:
    """Have no family describe a model's blocks meanwhile; its steps may be captured as ever."""
    from warmgraph_backends.families import catalogue
    from warmgraph_backends.reasons import of

    root = TRANSFORMERS[name.removeprefix(SMALL)].root
    family = catalogue._BY_ROOT[root]
    none = {root: lambda module: of("no_plan", model=type(module).__name__)}
    catalogue._BY_ROOT[root] = dataclasses.replace(family, roots=none, forms={})
    try:
        yield
    finally:
        catalogue._BY_ROOT[root] = family


class Prompt(NamedTuple):
    """One prompt: everything that is drawn for it."""

    model: int
    size: tuple[int, ...]
    steps: int
    override: str
    lora: float
    before: str
    tokens: int
    keeps: str


def learned_soak(
    *, names: list[str], store: str, seed: int, prompts: int, scale: int = 1, workers: int = 0
) -> dict[str, Any]:
    """Run prompts drawn from a seed by what was learned of small models; the last latent of each
    beside eager's.

    Args:
        names: of the models, which are small ones (`transformer_kinds.SMALL`).
        scale: sizes are divided by this (a smoke run).

    Returns:
        {"prompts", "wrong": those whose last latent is not eager's, "worst", "builds", "regions",
        "calls" of blocks, "eager": what is not compiled}

    Raises:
        RuntimeError: a prompt failed; the text has all that was drawn for it.
    """
    engine = open_engine(Path(store), workers=workers)
    eager = [load(name, Path()) for name in names]
    models = [engine.compile_model(model, when_missing="background") for model in eager]
    for name, model in zip(names, models, strict=True):
        serve_all(engine, name, model, [*pixels(SIZES[0], scale), 1])
    files = set(graph_files(Path(store)))
    attention, draw = Attention(), random.Random(seed)
    wrong: list[dict[str, Any]] = []
    worst = 0.0
    result: dict[str, Any] = {}
    for number in range(prompts):
        prompt = _draw(draw, len(names), scale)

        def made(base: Any, prompt: Prompt = prompt) -> Any:
            if prompt.lora:
                base = with_lora(base, "LoraLoaderModelOnly", rank=4, strength=prompt.lora)
            chosen = attention if prompt.override == "unknown" else attends
            if prompt.keeps in ("option", "both"):  # blocks are compared where no node reads it
                base, chosen = counted(base), reads_option
            return overridden(base.clone(), chosen, prompt.override)

        def latent(model: Any, prompt: Prompt = prompt, number: int = number) -> Any:
            given = {"steps": prompt.steps, "seed": number, "tokens": prompt.tokens}
            with root_keeps(model, keeps=prompt.keeps in ("root", "both")):
                return flat(sample(names[prompt.model], model, list(prompt.size), **given))

        ours, reference = made(models[prompt.model]), made(eager[prompt.model])
        if prompt.before == "unload":
            unload(ours)
        try:
            found = rel_l2(latent(ours), latent(reference))
        except Exception as error:
            text = f"seed {seed}, prompt {number} {prompt}: {type(error).__name__}: {error}"
            raise RuntimeError(text) from error
        worst = max(worst, found)
        if not found <= MOST:
            wrong.append({"number": number, **prompt._asdict(), "rel_l2": found})
        reports = [engine.report(model) for model in models]
        result = {
            "seed": seed,
            "prompts": number + 1,
            "wrong": wrong,
            "worst": worst,
            "builds": len(set(graph_files(Path(store))) - files),
            "regions": {n: r["regions"] for n, r in zip(names, reports, strict=True)},
            "calls": {n: r["calls"] for n, r in zip(names, reports, strict=True)},
            "eager": {n: r.get("eager") for n, r in zip(names, reports, strict=True)},
        }
        partial(result)
    engine.close()
    return result


def _draw(draw: random.Random, models: int, scale: int) -> Prompt:
    size = [*pixels(draw.choice(SIZES), scale), 1]
    return Prompt(
        model=draw.randrange(models),
        size=(*size, draw.choice((1, 1, 2, 3))),
        steps=draw.choice((2, 3, 5)),
        override=draw.choice(("", "", "unknown", "known")),
        lora=draw.choice((0.0, 0.0, 0.7, -0.4)),
        before=draw.choice(("", "", "", "", "", "unload")),
        tokens=draw.choice((1, 13, 77, 300)),
        keeps=draw.choice(KINDS),
    )
