"""Models in float16 that overflow, beside the host's own; and what it costs to round as the host
does.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ..host import end_node
from ..measure import Probe, rel_l2
from ..models import operations, unet_config
from ..pack import ROOT, brief, import_alias, open_engine
from .common import call_errors
from .common import partial as report
from .prebuilt import least_ms

_UNET = "comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel"
#: Latent sides, batch and tokens of the text.
SIZES = ((12, 10, 2, 5), (32, 24, 1, 77))
#: Where a number of ours alone is not finite.
LOST = 1e9


def half_overflow(
    *, bounded: list[str], others: list[str], store: str, workers: int = 0
) -> dict[str, Any]:
    """Sample small models in float16: by turns one that overflows and a sound one.

    Args:
        bounded: kinds of `dev.tools.overflowing`, whose weights are too large.
        others: kinds of `dev.tools.small_transformers`, of which one prompt's text is too large.

    Returns:
        {"rows": [{"kind", "overflows", "size", "error": the largest of the model's calls, as
        `overflowing.distance` has it, or `LOST`, "not_finite": the share of the host's numbers}],
        "regions": {kind: places, and calls of blocks that no graph served}}
    """
    import torch

    import_alias("warmgraph_tools", ROOT / "dev" / "tools")
    from warmgraph_tools import overflowing
    from warmgraph_tools import small_transformers as small

    engine = open_engine(Path(store), workers=workers, captured=False)
    rows: list[dict[str, Any]] = []
    regions: dict[str, Any] = {}
    for kind in (*bounded, *others):
        for overflows in (True, False, True, False):
            loaded = small.load(kind, dtype=torch.float16)
            if overflows and kind in bounded:
                overflowing.enlarge(loaded.model.diffusion_model, kind)
            loud = overflows and kind in others
            probes = Probe(), Probe()
            pair = [probe.attach(loaded) for probe in probes]
            pair[1] = engine.compile_model(pair[1], when_missing="wait")
            for size in SIZES:
                found = _compare(kind, pair, probes, size, loud=loud)
                rows.append({"kind": kind, "overflows": overflows, "size": list(size), **found})
            made = brief(engine.report(pair[1]))
            regions[kind] = {**made["regions"], "calls_eager": made["calls"]["eager"]}
            report({"rows": rows, "regions": regions})
    engine.close()
    return {"rows": rows, "regions": regions}


def _compare(
    kind: str, pair: Sequence[Any], probes: tuple[Probe, Probe], size: Sequence[int], *, loud: bool
) -> dict[str, Any]:
    """One step of ours, then eager's calls on what ours were given."""
    from warmgraph_tools import overflowing

    eager, ours = pair
    shares = []

    def distance(output: Any, reference: Any) -> float:
        shares.append(1 - float(reference.isfinite().double().mean()))
        return overflowing.distance(output, reference)

    errors = call_errors(
        lambda: _sample(kind, ours, size, loud=loud),
        probes[1],
        lambda: _sample(kind, eager, size, loud=loud),
        probes[0],
        distance=distance,
    )
    return {"error": min(max(errors), LOST), "not_finite": round(max(shares), 4)}


def _sample(kind: str, model: Any, size: Sequence[int], *, loud: bool) -> None:
    import comfy.sample

    from warmgraph_tools import overflowing
    from warmgraph_tools import small_transformers as small

    height, width, batch, tokens = size
    latent = small.latent(kind, height, width, batch=batch)["samples"]
    latent = comfy.sample.fix_empty_latent_channels(model, latent)
    positive = small.conditioning(kind, tokens)
    positive = overflowing.loud(positive) if loud else positive
    negative = small.conditioning(kind, tokens, seed=2)
    noise = comfy.sample.prepare_noise(latent, 0)
    texts = positive, negative
    try:
        comfy.sample.sample(
            model, noise, 1, 3.0, "euler", "simple", *texts, latent, disable_pbar=True
        )
    finally:
        end_node()


# --- what it costs --------------------------------------------------------------------------------


def kept_roundings(
    *,
    roots: Mapping[str, tuple[str, Mapping[str, Any]]],
    unets: Sequence[str],
    larger: Mapping[str, float],
    size: int | None = None,
) -> dict[str, Any]:
    """Compile each form of models' blocks in float16 as it is, rounding as the host does where an
    infinity may be bounded, and without that, and time both and the host's by turns.

    Args:
        roots: by name, a class of the host's ("module:Class") and what it takes; no weights are
            made but one block's at a time.
        unets: kinds of `models`, likewise.
        larger: by how names of weights end, how many times as large they are where results that
            overflow are compared.
        size: of all that is counted, rows and tokens; None is what kernels are tuned for.

    Returns:
        {"rows": {"NAME FORM": {"rounds": whether it does, and for those "ms": {"rounding",
        "fused", "eager"}, "ratio": rounding / fused, "sound_error": from the host's, "error" and
        "error_fused": likewise where weights are that large}}}
    """
    import torch
    from comfy.model_management import get_torch_device

    import_alias("warmgraph_tools", ROOT / "dev" / "tools")
    import_alias("warmgraph_backends", ROOT / "backends")
    from warmgraph_backends.families.catalogue import plan_model
    from warmgraph_backends.plans.specs import describe_place

    device = get_torch_device().type
    rows: dict[str, Any] = {}
    made = {name: (path, settings) for name, (path, settings) in roots.items()}
    made |= {name: (_UNET, unet_config(name)) for name in unets}
    for name, given in made.items():
        plan = plan_model(_root(*given))
        for place in {each.form.name: each for each in reversed(plan.places)}.values():
            description = describe_place(place, plan, dtype=torch.float16, device=device)
            rows[f"{name} {place.form.name}"] = _cost(description, larger, size)
            report({"rows": rows})
    return {"rows": rows}


def _root(path: str, settings: Mapping[str, Any]) -> Any:
    import torch

    module, _, cls = path.partition(":")
    options = {"dtype": torch.float16, "device": "meta", "operations": operations()}
    with torch.device("meta"):
        return getattr(importlib.import_module(module), cls)(**settings, **options)


def _cost(description: Any, larger: Mapping[str, float], size: int | None) -> dict[str, Any]:
    from warmgraph_tools import overflowing

    program, rounding = _compiled(description, rounds=True)
    if rounding is None:
        return {"rounds": False}
    _, fused = _compiled(description, rounds=False)
    sizes = {} if size is None else {each.name: size for each in description.symbols}
    weights, inputs = program.example(sizes)
    calls = {
        "rounding": lambda: rounding([*weights, *inputs]),
        "fused": lambda: fused([*weights, *inputs]),
        "eager": lambda: program.run(weights, inputs),
    }
    sound = calls["eager"]()
    error = max(map(rel_l2, calls["rounding"](), sound))
    ms = least_ms(calls)
    for spec, weight in zip(program.weights, weights, strict=True):
        for ends, factor in larger.items():
            if spec.name.endswith(ends):
                weight.mul_(factor)
    theirs = calls["eager"]()
    errors = {
        name: min(LOST, max(map(overflowing.distance, calls[name](), theirs)))
        for name in ("rounding", "fused")
    }
    return {
        "rounds": True,
        "ms": {name: round(each, 4) for name, each in ms.items()},
        "ratio": round(ms["rounding"] / ms["fused"], 3),
        "sound_error": error,
        "error": errors["rounding"],
        "error_fused": errors["fused"],
    }


def _compiled(description: Any, *, rounds: bool) -> tuple[Any, Any]:
    """The program of a kind, and what its graph is called by; None where it is to round as the host
    does and does so anyhow.
    """
    from warmgraph_backends.compilers import lowering
    from warmgraph_backends.families.catalogue import code_of
    from warmgraph_backends.host_api.attention import host_order
    from warmgraph_backends.torch_api import compiling
    from warmgraph_backends.worker.export import export

    program = export(code_of(description))
    graph = program.graph_module.graph
    if rounds and not lowering.may_bound_overflows(graph):
        return program, None
    fused = nullcontext() if rounds else patch.object(lowering, "may_bound_overflows", _never)
    with fused, host_order():
        # As in a worker: a pool's processes do not know these settings.
        config = {**lowering.config_of(program), "compile_threads": 1}
        module, _ = compiling.compile_wrapper(
            program.graph_module, config, last_pass=lowering.suited_to_device(program)
        )
    return program, module.call


def _never(graph: Any) -> bool:
    return False
