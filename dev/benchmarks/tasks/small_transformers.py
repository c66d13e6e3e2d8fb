"""Small transformers through Compile Model against eager: every family, format and residency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..host import end_node
from ..measure import rel_l2
from ..pack import ROOT, brief, import_alias, open_engine, settle_second_graphs
from .common import BUILD_LIMIT_S, partial

#: Latent sides, batch and tokens of the text.
SIZES = (
    *((16, 16, 1, 13), (17, 31, 1, 300), (32, 24, 2, 1), (64, 64, 1, 77)),
    *((48, 80, 1, 13), (16, 16, 4, 120)),
)
WHOLE_SIZES = ((16, 16, 1, 13), (32, 24, 2, 77))
#: Of a run of which the last ones are replayed.
STEPS = 8
#: Of such runs: a larger call must not harm what was captured of a smaller one.
LONG_SIZES = (SIZES[0], SIZES[3], SIZES[0])
#: How strong a LoRA is, run by run.
STRENGTHS = (1.0, 0.5, 0.0)
OVERRIDE = "optimized_attention_override"


def small_transformers(
    *,
    kinds: list[str],
    store: str,
    dtype: str = "bfloat16",
    formats: list[str],
    workers: int = 0,
    whole: Sequence[str] = (),
    lora: bool = True,
) -> dict[str, Any]:
    """Sample each kind eager and by ours, through all that people change: several sizes, a LoRA, a
    second checkpoint, another attention.

    Args:
        kinds: of `dev.tools.small_transformers`.
        formats: in which the blocks of a small Flux are quantised, one after the other.
        whole: kinds that no family describes and none is learned for, of which whole steps alone
            are captured.
        lora: whether a LoRA is among the changes.

    Returns:
        {"rows": [{"kind", "errors" (relative L2 of latents, one for each change), "regions",
        "eager", "calls", "builds" after the first size, "overridden": calls of the override, its
        "override_error", "moved": the latent by the LoRA, "own": how far the host's own latents
        move with the last bit of the text's numbers, the largest of these changes, "long_own":
        likewise of runs of several steps, "captured" and "exact": of such runs by compiled blocks,
        and by the host's own forward, {"error", "max_abs_diff" (largest), "replayed",
        "not_replayed"}}],
        "whole": [{"kind", "auto" and "exact": of such runs of the kinds without regions, at several
        sizes one after the other, "regions", "calls", "notes"}]}
    """
    import torch

    small = _small()
    engine = open_engine(Path(store), workers=workers, learned=not whole)
    rows: list[dict[str, Any]] = []
    for name in _all(kinds, formats):
        rows.append(_row(engine, small, name, getattr(torch, dtype), lora=lora))
        partial({"rows": rows})
    without = []
    for kind in whole:
        without.append(_whole(engine, small, kind, getattr(torch, dtype)))
        partial({"rows": rows, "whole": without})
    engine.close()
    return {"rows": rows, "whole": without}


def restarted_transformers(
    *, kinds: list[str], store: str, dtype: str = "bfloat16", formats: list[str], workers: int = 0
) -> dict[str, Any]:
    """Sample each kind of `small_transformers`, whose graphs are in the store, in a new process.

    Returns:
        {"rows": [{"kind", "error", "builds", "loads", "regions", "calls"}]}
    """
    import torch

    small = _small()
    engine = open_engine(Path(store), workers=workers)
    rows: list[dict[str, Any]] = []
    for name in _all(kinds, formats):
        loaded = _load(small, name, getattr(torch, dtype))
        ours = engine.compile_model(loaded, when_missing="wait")
        eager, made = (_sample(small, name, model, SIZES[1]) for model in (loaded, ours))
        report = brief(engine.report(ours))
        kept = {key: report[key] for key in ("builds", "loads", "regions", "calls")}
        rows.append({"kind": name, "error": float(rel_l2(made, eager)), **kept})
        partial({"rows": rows})
    engine.close()
    return {"rows": rows}


def _small() -> Any:
    import_alias("warmgraph_tools", ROOT / "dev" / "tools")
    from warmgraph_tools import small_transformers as small

    return small


def _all(kinds: list[str], formats: list[str]) -> list[str]:
    """By kind, and by kind and format."""
    return [*kinds, *(f"flux1 {form}" for form in formats)]


def _load(small: Any, name: str, dtype: Any, *, seed: int = 0) -> Any:
    kind, _, form = name.partition(" ")
    if form:
        return small.load_quantised(kind, form, seed=seed)
    return small.load(kind, dtype=dtype, seed=seed)


def _row(engine: Any, small: Any, name: str, dtype: Any, *, lora: bool) -> dict[str, Any]:
    """All changes of one kind."""
    loaded = _load(small, name, dtype)
    ours = engine.compile_model(loaded, when_missing="wait")
    pair = (loaded, ours)
    found = [_compare(small, name, pair, SIZES[0])]
    # Graphs for larger calls may come later.
    settle_second_graphs(engine, ours, limit_s=BUILD_LIMIT_S)
    built = engine.report(ours)["builds"]
    found += [_compare(small, name, pair, size) for size in SIZES[1:]]
    if lora:
        before = _sample(small, name, ours, SIZES[0])
        for strength in STRENGTHS:
            patched = [_with_lora(model, strength) for model in pair]
            found.append(_compare(small, name, patched, SIZES[0]))
        moved = rel_l2(_sample(small, name, _with_lora(ours, STRENGTHS[0]), SIZES[0]), before)
    calls: list[Any] = []
    overridden = [_overridden(model, calls) for model in pair]
    by_override = _compare(small, name, overridden, SIZES[0])
    exact = engine.compile_model(loaded, form="exact")
    long = [_sample(small, name, loaded, size, steps=STEPS) for size in LONG_SIZES]
    runs = {}
    for label, model in (("captured", ours), ("exact", exact)):
        made = [_sample(small, name, model, size, steps=STEPS) for size in LONG_SIZES]
        runs[label] = _replayed(engine, model, long, made)
    second = _load(small, name, dtype, seed=1)
    compiled = engine.compile_model(second, when_missing="wait")
    found.append(_compare(small, name, (second, compiled), SIZES[0]))
    reports = [engine.report(model) for model in (ours, compiled)]
    return {
        "kind": name,
        "errors": [each.error for each in found],
        "builds": reports[0]["builds"] - built + reports[1]["builds"],
        "overridden": len(calls),
        "override_error": by_override.error,
        "moved": moved if lora else None,
        "own": max(each.own for each in (*found, by_override)),
        "long_own": max(
            _own(small, name, loaded, size, latent, steps=STEPS)
            for size, latent in list(zip(LONG_SIZES, long, strict=True))[:2]
        ),
        **runs,
        **{key: brief(reports[0])[key] for key in ("regions", "eager", "calls", "notes")},
    }


class _Found(NamedTuple):
    """Relative L2 of a latent by ours to the host's, and how far the host's own moves (`_own`)."""

    error: float
    own: float


def _compare(small: Any, name: str, pair: Sequence[Any], size: tuple[int, int, int, int]) -> _Found:
    """Compare a latent by the second model with that by the first."""
    eager, made = (_sample(small, name, model, size) for model in pair)
    return _Found(float(rel_l2(made, eager)), _own(small, name, pair[0], size, eager))


def _own(
    small: Any,
    name: str,
    model: Any,
    size: tuple[int, int, int, int],
    latent: Any,
    *,
    steps: int = 1,
) -> float:
    """How far a model's own latent moves when each number of its text does, by its last bit in
    bfloat16: no other way to compute it can be expected to come nearer.
    """
    return float(rel_l2(_sample(small, name, model, size, steps=steps, nudged=True), latent))


def _with_lora(model: Any, strength: float) -> Any:
    """A clone with a change of one layer of each stack of blocks, as nodes for LoRA patch it."""
    import torch

    clone = model.clone()
    generator = torch.Generator().manual_seed(9)
    changes = {}
    stacks = set()
    for name, layer in clone.model.diffusion_model.named_modules():
        stack, number, _ = [*name.split(".", 2), "", ""][:3]
        if number.isdigit() and stack not in stacks and hasattr(layer, "out_features"):
            stacks.add(stack)
            shape = layer.out_features, layer.in_features
            change = torch.randn(shape, generator=generator) / shape[1] ** 0.5
            changes[f"diffusion_model.{name}.weight"] = ("diff", (change,))
    if sorted(clone.add_patches(changes, strength)) != sorted(changes):
        raise RuntimeError(f"the host knows not all of {list(changes)}")
    return clone


def _whole(engine: Any, small: Any, kind: str, dtype: Any) -> dict[str, Any]:
    """Runs of a model without regions, by what Compile Model makes of it and as its exact form."""
    loaded = small.load(kind, dtype=dtype)
    forms = {form: engine.compile_model(loaded, form=form) for form in ("auto", "exact")}
    runs: dict[str, Any] = {form: [] for form in forms}
    for size in WHOLE_SIZES:
        eager = _sample(small, kind, loaded, size, steps=STEPS)
        for form, model in forms.items():
            found = _sample(small, kind, model, size, steps=STEPS)
            runs[form].append(_replayed(engine, model, [eager], [found]))
    report = brief(engine.report(forms["auto"]))
    return {"kind": kind, **runs, **{key: report[key] for key in ("regions", "calls", "notes")}}


def _replayed(engine: Any, model: Any, eager: list[Any], found: list[Any]) -> dict[str, Any]:
    """How runs of several steps compare with eager's, and how many steps were replayed."""
    captured = engine.report(model)["captured"]
    pairs = list(zip(found, eager, strict=True))
    return {
        "error": max(rel_l2(one, other) for one, other in pairs),
        "max_abs_diff": max(float((one - other).abs().max()) for one, other in pairs),
        "replayed": captured["replayed"],
        "not_replayed": captured["not_replayed"],
    }


def _sample(
    small: Any,
    name: str,
    model: Any,
    size: tuple[int, int, int, int],
    *,
    steps: int = 1,
    nudged: bool = False,
) -> Any:
    """Sample by the host's sampler; `nudged`: the text's numbers have another last bit."""
    import comfy.sample

    kind = name.partition(" ")[0]
    height, width, batch, tokens = size
    latent = small.latent(kind, height, width, batch=batch)["samples"]
    latent = comfy.sample.fix_empty_latent_channels(model, latent)
    prompt = small.conditioning(kind, tokens)
    if nudged:
        prompt = [[_nudged(text), options] for text, options in prompt]
    noise = comfy.sample.prepare_noise(latent, 0)
    try:
        return comfy.sample.sample(
            model, noise, steps, 1.0, "euler", "simple", prompt, prompt, latent, disable_pbar=True
        ).cpu()
    finally:
        end_node()


def _nudged(text: Any) -> Any:
    import torch

    rounded = text.to(torch.bfloat16)
    return (rounded.view(torch.int16) ^ 1).view(torch.bfloat16).to(text.dtype)


def _overridden(model: Any, calls: list[Any]) -> Any:
    """A clone whose attention is another function, as nodes for SageAttention do it."""

    def halved(function: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(function)
        return 0.5 * function(*args, **kwargs)

    clone = model.clone()
    options = clone.model_options["transformer_options"]
    clone.model_options["transformer_options"] = {**options, OVERRIDE: halved}
    return clone
