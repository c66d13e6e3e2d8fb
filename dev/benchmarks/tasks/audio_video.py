"""Small models of video and audio through Compile Model against eager: sizes, known frames, files
and residency.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..host import end_node
from ..measure import flat, rel_l2
from ..pack import ROOT, brief, import_alias, open_engine, settle_second_graphs
from .common import BUILD_LIMIT_S, partial
from .small_transformers import _nudged, _with_lora


class Case(NamedTuple):
    """One call: a latent's sides and frames, the audio's length, tokens of text, and of how many
    frames some part is known.
    """

    height: int
    width: int
    frames: int
    sounds: int
    tokens: int
    known: int = 0


CASES = (
    Case(6, 4, 3, 8, 13),
    Case(18, 32, 7, 41, 300),
    Case(8, 8, 4, 8, 77, known=1),
    Case(2, 2, 2, 1, 1),
)


def small_audio_video(
    *,
    kinds: list[str],
    store: str,
    dtype: str = "bfloat16",
    workers: int = 0,
    lora: bool = True,
) -> dict[str, Any]:
    """Sample each kind eager and by ours, at several sizes, with known frames and with a LoRA.

    Args:
        kinds: of `dev.tools.small_transformers`, with a format of its file behind a blank.
        lora: whether a LoRA is among the changes.

    Returns:
        {"rows": [{"kind", "errors" (relative L2 of latents, one for each change), "own": how far
        the host's own latents move with the last bit of the text's numbers, "moved": by the LoRA,
        "builds" after the first, "regions", "calls", "eager"}]}
    """
    import torch

    import_alias("warmgraph_tools", ROOT / "dev" / "tools")
    from warmgraph_tools import small_transformers as small

    engine = open_engine(Path(store), workers=workers)
    rows = []
    for name in kinds:
        kind, _, form = name.partition(" ")
        if form:
            loaded = small.load_quantised(kind, form)
        else:
            loaded = small.load(kind, dtype=getattr(torch, dtype))
        rows.append({"kind": name, **_row(engine, small, kind, loaded, lora=lora)})
        partial({"rows": rows})
    engine.close()
    return {"rows": rows}


def _row(engine: Any, small: Any, kind: str, loaded: Any, *, lora: bool) -> dict[str, Any]:
    ours = engine.compile_model(loaded, when_missing="wait")
    cases = [case for case in CASES if not (case.known and kind.startswith("h3"))]
    errors, own = [_error(small, kind, (loaded, ours), cases[0])], []
    settle_second_graphs(engine, ours, limit_s=BUILD_LIMIT_S)
    built = engine.report(ours)["builds"]
    errors += [_error(small, kind, (loaded, ours), case) for case in cases[1:]]
    for case in cases:
        nudged = _sample(small, kind, loaded, case, nudged=True)
        own.append(float(rel_l2(nudged, _sample(small, kind, loaded, case))))
    moved = None
    if lora:
        pair = [_with_lora(model, 1.0) for model in (loaded, ours)]
        errors.append(_error(small, kind, pair, cases[0]))
        plain = _sample(small, kind, ours, cases[0])
        moved = float(rel_l2(_sample(small, kind, pair[1], cases[0]), plain))
    report = engine.report(ours)
    return {
        "errors": errors,
        "own": max(own),
        "moved": moved,
        "builds": report["builds"] - built,
        **{key: brief(report)[key] for key in ("regions", "eager", "calls")},
    }


def _error(small: Any, kind: str, pair: Sequence[Any], case: Case) -> float:
    eager, made = (_sample(small, kind, model, case) for model in pair)
    return float(rel_l2(made, eager))


def _sample(small: Any, kind: str, model: Any, case: Case, *, nudged: bool = False) -> Any:
    """One step by the host's sampler; all latents as one row."""
    import comfy.sample
    import torch
    from comfy.nested_tensor import NestedTensor

    height, width, frames, sounds, tokens, known = case
    latent = small.latent(kind, height, width, frames=frames, sounds=sounds)["samples"]
    prompt = small.conditioning(kind, tokens)
    if nudged:
        prompt = [[_nudged(text), options] for text, options in prompt]
    mask = None
    if known:
        video, *audio = latent.unbind() if latent.is_nested else (latent,)
        mask = torch.ones_like(video[:, :1])
        mask[:, :, :known] = 0.0
        if audio:
            mask = NestedTensor((mask, torch.ones_like(audio[0])))
    noise = comfy.sample.prepare_noise(latent, 0)
    given = (model, noise, 1, 1.0, "euler", "simple", prompt, prompt, latent)
    try:
        made = comfy.sample.sample(*given, noise_mask=mask, disable_pbar=True, seed=0).cpu()
    finally:
        end_node()
    return flat(made)
