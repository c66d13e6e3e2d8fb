"""Small transformers through Compile Model against eager: every family, format and residency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..host import end_node
from ..measure import rel_l2
from ..pack import ROOT, brief, import_alias, open_engine, settle_second_graphs
from .common import BUILD_LIMIT_S, partial

#: Latent sides, batch and tokens of the text.
SIZES = ((16, 16, 1, 13), (17, 31, 1, 300), (32, 24, 2, 1), (64, 64, 1, 77))
WHOLE_SIZES = ((16, 16, 1, 13), (32, 24, 2, 77))
#: Of a run of which the last ones are replayed.
STEPS = 8
#: Of such runs: a larger call must not harm what was captured of a smaller one.
LONG_SIZES = (SIZES[0], SIZES[3], SIZES[0])
OVERRIDE = "optimized_attention_override"


def small_transformers(
    *,
    kinds: list[str],
    store: str,
    dtype: str = "bfloat16",
    formats: list[str],
    workers: int = 0,
    whole: Sequence[str] = (),
) -> dict[str, Any]:
    """Sample each kind eager and by ours, at several sizes, and with its attention overridden.

    Args:
        kinds: of `tools.small_transformers`.
        formats: in which the blocks of a small Flux are quantised, one after the other.
        whole: kinds without regions, of which whole steps alone are captured.

    Returns:
        {"rows": [{"kind", "errors" (relative L2 of latents), "regions", "eager", "calls", "builds"
        after the first size, "overridden": calls of the override, its "override_error",
        "captured" and "exact": of runs of several steps by compiled blocks, and by the host's own
        forward, {"error", "max_abs_diff" (largest), "replayed", "not_replayed"}}],
        "whole": [{"kind", "auto" and "exact": of such runs of the kinds without regions, at several
        sizes one after the other, "regions", "calls", "notes"}]}
    """
    import torch

    import_alias("warmgraph_tools", ROOT / "tools")
    from warmgraph_tools import small_transformers as small

    engine = open_engine(Path(store), workers=workers)
    rows: list[dict[str, Any]] = []
    for name in [*kinds, *(f"flux1 {form}" for form in formats)]:
        kind, _, form = name.partition(" ")
        loaded = (
            small.load_quantised(kind, form)
            if form
            else small.load(kind, dtype=getattr(torch, dtype))
        )
        ours = engine.compile_model(loaded, when_missing="wait", form="any shape")
        errors = []
        builds = None
        for size in SIZES:
            eager, found = (_sample(small, kind, model, size) for model in (loaded, ours))
            errors.append(rel_l2(found, eager))
            if builds is None:  # graphs for larger calls may come later
                settle_second_graphs(engine, ours, limit_s=BUILD_LIMIT_S)
                builds = engine.report(ours)["builds"]
        calls: list[Any] = []
        overridden = [_overridden(model, calls) for model in (loaded, ours)]
        eager, found = (_sample(small, kind, model, SIZES[0]) for model in overridden)
        exact = engine.compile_model(loaded, form="exact")
        long = [_sample(small, kind, loaded, size, steps=STEPS) for size in LONG_SIZES]
        runs = {}
        for label, model in (("captured", ours), ("exact", exact)):
            made = [_sample(small, kind, model, size, steps=STEPS) for size in LONG_SIZES]
            runs[label] = _replayed(engine, model, long, made)
        report = engine.report(ours)
        rows.append(
            {
                "kind": name,
                "errors": errors,
                "builds": report["builds"] - (builds or 0),
                "overridden": len(calls),
                "override_error": rel_l2(found, eager),
                **runs,
                **{key: brief(report)[key] for key in ("regions", "eager", "calls", "notes")},
            }
        )
        partial({"rows": rows})
    without = []
    for kind in whole:
        without.append(_whole(engine, small, kind, getattr(torch, dtype)))
        partial({"rows": rows, "whole": without})
    engine.close()
    return {"rows": rows, "whole": without}


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
    small: Any, kind: str, model: Any, size: tuple[int, int, int, int], *, steps: int = 1
) -> Any:
    """Sample by the host's sampler."""
    import comfy.sample

    height, width, batch, tokens = size
    latent = small.latent(kind, height, width, batch=batch)["samples"]
    latent = comfy.sample.fix_empty_latent_channels(model, latent)
    prompt = small.conditioning(kind, tokens)
    noise = comfy.sample.prepare_noise(latent, 0)
    try:
        return comfy.sample.sample(
            model, noise, steps, 1.0, "euler", "simple", prompt, prompt, latent, disable_pbar=True
        ).cpu()
    finally:
        end_node()


def _overridden(model: Any, calls: list[Any]) -> Any:
    """A clone whose attention is another function, as nodes for SageAttention do it."""

    def halved(function: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(function)
        return 0.5 * function(*args, **kwargs)

    clone = model.clone()
    options = clone.model_options["transformer_options"]
    clone.model_options["transformer_options"] = {**options, OVERRIDE: halved}
    return clone
