"""A diffusion transformer, as the host runs it, by ours, and with each block by `torch.compile`."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

from ..kernels import kernel_times
from ..measure import Call, Mode, Probe, Stopwatch, peak_mib, rel_l2, start_peak, summary
from ..pack import brief, build_seconds, graph_files, open_engine, settle, settle_second_graphs
from ..transformer_kinds import SMALL, TRANSFORMERS
from ..transformers import load, sample, with_lora
from .common import BUILD_LIMIT_S, CAPTURE_STEPS, call_errors, partial
from .rival import skip_transformer_options, without_dynamic

logger = logging.getLogger(__name__)

WARM_STEPS = 2
PROFILED_STEPS = 2


def transformer(
    *,
    name: str,
    path: str,
    store: str,
    sizes: list[list[int]],
    rival: bool = True,
    exact: bool = True,
    exact_sizes: list[list[int]] | None = None,
    truth: bool = False,
    lora: str | None = None,
    strength: float = 0.8,
    rounds: int = 3,
    steps: int = 8,
    workers: int = 0,
) -> dict[str, Any]:
    """Time a model's calls by turns at every size, and compare ours with eager call by call.

    Args:
        path: of its file, written now if it is not there.
        sizes: as `transformers.sample` takes them.
        rival: whether blocks compiled one by one by `torch.compile` take turns, too, at the first
            size.
        exact: whether the host's own forward, captured, takes turns.
        exact_sizes: at which it is compared with eager, bit for bit.
        truth: also compare ours and eager with the same file computed in float32.
        lora: the host's node that puts a LoRA on all products of its blocks (`with_lora`); eager
            has it, too.
        strength: of that.

    Returns:
        {"file_seconds", "ready_seconds" from an empty store, "build_seconds" of each graph,
        "builds", "builds_after_first", "disk_mb", "rows": {size:
        {form: times, "speedup", "vs_per_block_torch_compile", "rel_l2"}}, "profile",
        "exact_max_abs_diff", "errors" against float32 of each call, {"ours", "eager"},
        "attention_ms", "products_ms": of the kernels to choose from}
    """
    import torch

    result: dict[str, Any] = {"rows": {}}
    watch = Stopwatch()
    loaded = load(name, Path(path))
    if lora is not None:
        loaded = with_lora(loaded, lora, strength=strength)
    result["file_seconds"] = round(watch.seconds(), 1)
    engine = open_engine(Path(store), workers=workers)
    probes = {form: Probe() for form in ("eager", "ours")}
    models = {form: probe.attach(loaded) for form, probe in probes.items()}
    run = functools.partial(sample, name)
    run(models["eager"], sizes[0], steps=1)
    watch = Stopwatch()
    models["ours"] = engine.compile_model(models["ours"], when_missing="wait")
    run(models["ours"], sizes[0], steps=1)
    settle(engine, models["ours"], limit_s=BUILD_LIMIT_S)
    result["ready_seconds"] = round(watch.seconds(), 2)
    result["report"] = brief(engine.report(models["ours"]))
    files = graph_files(Path(store))
    result["build_seconds"] = build_seconds(Path(store))
    result["disk_mb"] = round(sum(files.values()) / 1e6, 3)
    partial(result)
    # Nothing builds beside steps.
    settle_second_graphs(engine, models["ours"], limit_s=BUILD_LIMIT_S)
    first = engine.report(models["ours"])["builds"]
    if rival:
        probes["per_block"] = Probe()
        attached = probes["per_block"].attach(without_dynamic(loaded))
        models["per_block"] = _per_block(attached, TRANSFORMERS[name.removeprefix(SMALL)].blocks)
    if exact:
        probes["exact"] = Probe()
        attached = probes["exact"].attach(loaded)
        models["exact"] = engine.compile_model(attached, form="exact")
    for size in sizes:
        row = _time(run, models, probes, size, rounds=rounds, steps=steps, result=result)
        row["rel_l2"] = call_errors(
            functools.partial(run, models["ours"], size, steps=3),
            probes["ours"],
            functools.partial(run, models["eager"], size, steps=3),
            probes["eager"],
        )
        result["rows"]["x".join(map(str, size))] = row
        if "profile" not in result:
            result["profile"] = {
                form: kernel_times(functools.partial(run, model, size, steps=PROFILED_STEPS))
                for form, model in models.items()
                if form != "exact"
            }
        models.pop("per_block", None)
        report = engine.report(models["ours"])
        result["report"], result["captured"] = brief(report), report["captured"]
        if "exact" in models:
            result["captured_exact"] = engine.report(models["exact"])["captured"]
        partial(result)
    result["builds"] = result["report"]["builds"]
    result["builds_after_first"] = result["builds"] - first
    differences = [_difference(run, models, size) for size in exact_sizes or []]
    if differences:
        result["exact_max_abs_diff"] = max(differences)
        result["captured_exact"] = engine.report(models["exact"])["captured"]
        partial(result)
    if truth:
        exact32 = Probe()
        exactly = exact32.attach(load(name, Path(path), dtype=torch.float32))
        result["errors"] = _true_errors(run, models, probes, exactly, exact32, sizes[-1])
        partial(result)
    from warmgraph_backends.choices import attention_choice, int8_products

    kept = {"attention_ms": attention_choice.FILE_NAME, "products_ms": int8_products.FILE_NAME}
    for name, file in kept.items():
        times = Path(store + "-private") / file
        result[name] = json.loads(times.read_text()) if times.exists() else {}
    engine.close()
    return result


def _time(
    run: Any,
    models: dict[str, Any],
    probes: dict[str, Probe],
    size: list[int],
    *,
    rounds: int,
    steps: int,
    result: dict[str, Any],
) -> dict[str, Any]:
    """Times of each model's calls at one size, by turns; a rival that fails is left out from then
    on, with its reason.
    """
    for form in list(models):
        try:
            watch = Stopwatch()
            run(models[form], size, steps=WARM_STEPS)
        except Exception as error:
            if form in ("eager", "ours"):
                raise
            logger.exception("%s failed", form)
            result.setdefault("failed", {})[form] = f"{type(error).__name__}: {error}"[:1000]
            del models[form]
            continue
        result.setdefault("first_seconds", {}).setdefault(form, []).append(watch.seconds())
    peaks = dict.fromkeys(models, 0.0)
    calls: dict[str, list[float]] = {form: [] for form in models}
    whole: dict[str, list[float]] = {form: [] for form in models}
    for turn in range(rounds):
        for form, model in models.items():
            probes[form].start(Mode.TIME)
            start_peak()
            run(model, size, steps=WARM_STEPS + steps, seed=turn)
            peaks[form] = max(peaks[form], peak_mib())
            calls[form] += probes[form].milliseconds(skip=WARM_STEPS)
            whole[form] += probes[form].step_milliseconds(skip=WARM_STEPS)
            probes[form].start(Mode.OFF)
    row: dict[str, Any] = {
        form: {
            "call_ms": summary(calls[form]),
            "step_ms": summary(whole[form]),
            "peak_mib": round(peaks[form]),
        }
        for form in models
    }

    def median(form: str) -> float:
        return float(row[form]["step_ms"]["median"])

    row["speedup"] = round(median("eager") / median("ours"), 3)
    if "per_block" in models:
        row["vs_per_block_torch_compile"] = round(median("per_block") / median("ours"), 3)
    return row


def _difference(run: Any, models: dict[str, Any], size: list[int]) -> float:
    """The largest difference of a latent after steps of which the last ones are replayed."""
    eager, exact = (run(models[form], size, steps=CAPTURE_STEPS) for form in ("eager", "exact"))
    return float((eager - exact).abs().max())


def _true_errors(
    run: Any,
    models: dict[str, Any],
    probes: dict[str, Probe],
    exactly: Any,
    exact32: Probe,
    size: list[int],
) -> dict[str, list[float]]:
    """Relative L2 error of each call of ours and of eager's, on the same inputs."""

    def outputs(model: Any, probe: Probe, mode: Mode, replay: list[Call]) -> list[Call]:
        probe.start(mode, replay)
        run(model, size, steps=3)
        calls = probe.calls
        probe.start(Mode.OFF)
        return calls

    recorded = outputs(models["eager"], probes["eager"], Mode.RECORD, [])
    calls = {
        "eager": recorded,
        "ours": outputs(models["ours"], probes["ours"], Mode.REPLAY, recorded),
    }
    truth = outputs(exactly, exact32, Mode.REPLAY, recorded)
    return {
        form: [rel_l2(c.output, t.output) for c, t in zip(made, truth, strict=True)]
        for form, made in calls.items()
    }


def _per_block(model: Any, lists: tuple[str, ...]) -> Any:
    """A clone whose blocks are compiled each by itself, by the host's helper, as KJNodes does."""
    import torch
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 1024
    clone = model.clone()
    root = model.model.diffusion_model
    keys = [f"diffusion_model.{n}.{i}" for n in lists for i in range(len(getattr(root, n)))]
    options = {"guard_filter_fn": skip_transformer_options}
    set_torch_compile_wrapper(clone, "inductor", options=options, keys=keys)
    return clone
