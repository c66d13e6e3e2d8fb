"""Files of diffusion transformers at full size, loaded and sampled as the host does; or their small
twins.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import gguf_pack
from .host import Size, empty_latent, ksampler
from .models import random_network, write_network
from .pack import ROOT, import_alias
from .transformer_kinds import GGUF, SECOND, SMALL, TRANSFORMERS, Sounds


def write_transformer(path: Path, name: str, *, seed: int, device: str) -> int:
    """Write a file of a full-size model; returns its size in bytes."""
    import torch

    from .models import operations

    kind = TRANSFORMERS[name]
    module, _, cls = kind.root.partition(":")
    options = {"dtype": torch.bfloat16, "device": "meta", "operations": operations()}
    with torch.device("meta"):
        root = getattr(importlib.import_module(module), cls)(**kind.settings, **options)
    there = root.state_dict()
    shapes = {key: tuple(value.shape) for key, value in there.items()}
    if name in GGUF:
        weights = random_network(shapes, dtype=kind.dtype, seed=seed, device=device)
        return gguf_pack.write(path, weights, *GGUF[name][1:], device=device)
    return write_network(
        path,
        shapes,
        dtype=kind.dtype,
        seed=seed,
        device=device,
        form=kind.form,
        exact=[key for key, value in there.items() if value.dtype is torch.float32],
        metadata=_metadata(name),
    )


def _metadata(name: str) -> dict[str, str] | None:
    """What a model's file says of itself."""
    kind = TRANSFORMERS[name]
    return {"config": json.dumps({"transformer": kind.settings})} if kind.tells else None


def is_transformer(name: str) -> bool:
    """Tell whether a kind of a model is one of these, or the small twin of one."""
    return name.removeprefix(SMALL) in TRANSFORMERS


def load(name: str, path: Path, *, dtype: Any = None) -> Any:
    """Load a file as the UNETLoader node does, written now if it is not there; or a small twin.

    Args:
        dtype: what it computes in; None is what the host takes for this file.
    """
    if name.startswith(SMALL):
        return _load_small(name, dtype)
    import comfy.sd
    import torch

    if not path.exists():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        write_transformer(path, name, seed=int(path.stem.endswith(SECOND)), device=device)
    if name in GGUF:
        return gguf_pack.load(path)
    if TRANSFORMERS[name].form is not None:
        model = comfy.sd.load_diffusion_model(str(path))
        if dtype is None:
            return model
        return comfy.sd.load_diffusion_model_state_dict(
            _meant(model, dtype), model_options={"dtype": dtype}, metadata=_metadata(name)
        )
    options = {} if dtype is None else {"dtype": dtype}
    return comfy.sd.load_diffusion_model(str(path), model_options=options)


def _meant(model: Any, dtype: Any) -> dict[str, Any]:
    """The weights that a quantised model stands for, in this dtype."""
    from comfy.quant_ops import QuantizedTensor, get_layout_class

    root = model.model.diffusion_model
    weights = dict(root.named_buffers())
    for key, value in root.named_parameters():
        if isinstance(value.data, QuantizedTensor):
            params = dataclasses.replace(value.data.params, orig_dtype=dtype)
            layout = get_layout_class(value.data._layout_cls)
            weights[key] = layout.dequantize(value.data._qdata, params)
        else:
            weights[key] = value.data.to(dtype)
    return weights


def with_lora(model: Any, node: str, *, rank: int = 16, strength: float = 0.8) -> Any:
    """Return a clone with a LoRA on every product of its blocks.

    Args:
        node: which of the host's puts it there: "LoraLoaderModelOnly" or
            "LoraLoaderBypassModelOnly".
    """
    import comfy.sd
    import torch

    generator = torch.Generator().manual_seed(7)
    lora = {}
    for name, layer in model.model.named_modules():
        rows, columns = (getattr(layer, side, None) for side in ("out_features", "in_features"))
        repeated = "blocks." in name or "layers." in name
        if repeated and isinstance(rows, int) and isinstance(columns, int):
            down = torch.randn(rank, columns, generator=generator) / columns**0.5
            up = torch.randn(rows, rank, generator=generator) * 0.05
            lora |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
    if not lora:
        raise RuntimeError("the model must have blocks with linear layers, got none")
    load = {
        "LoraLoaderModelOnly": comfy.sd.load_lora_for_models,
        "LoraLoaderBypassModelOnly": comfy.sd.load_bypass_lora_for_models,
    }[node]
    patched, _ = load(model, None, lora, strength, 0.0)
    return gguf_pack.beside_weights(patched)


def sample(
    name: str,
    model: Any,
    size: list[int],
    *,
    steps: int,
    seed: int = 0,
    tokens: int | None = None,
    cfg: float | None = None,
    on_step: Callable[[int], None] | None = None,
) -> Any:
    """Sample as the KSampler node does.

    Args:
        size: [width, height, frames] in pixels and frames of the latent, then a batch if it is
            more than one, and how many first frames are there already.
        tokens: of its texts; None is as many as `TRANSFORMERS` says.
        cfg: None is the kind's own.
        on_step: called at each step's end.
    """
    width, height, frames, *batch = size
    known = batch.pop() if len(batch) > 1 else 0
    pixels = Size(width, height, *batch)
    sounds = TRANSFORMERS[name.removeprefix(SMALL)].sounds
    latent, mask = empty_latent(model, pixels, frames=frames), None
    if sounds is not None:
        latent, mask = _with_sounds(latent, sounds, known)
    return ksampler(
        model,
        _prompt(name, seed=1, tokens=tokens),
        _prompt(name, seed=2, tokens=tokens),
        pixels,
        steps=steps,
        cfg=TRANSFORMERS[name.removeprefix(SMALL)].cfg if cfg is None else cfg,
        seed=seed,
        scheduler="simple",
        latent=latent,
        noise_mask=mask,
        on_step=on_step,
    )


def _with_sounds(video: Any, sounds: Sounds, known: int) -> tuple[Any, Any]:
    """A latent of video and audio, and a mask where the first frames are known, as the host's nodes
    make them.
    """
    import torch
    from comfy.nested_tensor import NestedTensor

    video = video[:, :1].expand(-1, sounds.channels, *video.shape[2:]).clone()
    length = round(video.shape[2] * sounds.per_frame)
    audio = video.new_zeros(len(video), *sounds.before, length, *sounds.after)
    latent = NestedTensor((video, audio))
    if not known:
        return latent, None
    mask = torch.ones_like(video[:, :1])
    mask[:, :, :known] = 0.0
    return latent, NestedTensor((mask, torch.ones_like(audio)))


def _load_small(name: str, dtype: Any) -> Any:
    """The MODEL of a small twin; of a quantised one, in a dtype, of what its weights stand for."""
    import_alias("warmgraph_tools", ROOT / "dev" / "tools")
    from warmgraph_tools import small_transformers as small

    kind = TRANSFORMERS[name.removeprefix(SMALL)]
    if name.removeprefix(SMALL) in GGUF:
        return gguf_pack.load_small(kind.small, GGUF[name.removeprefix(SMALL)][1])
    if kind.form is None:
        return small.load(kind.small, **({} if dtype is None else {"dtype": dtype}))
    model = small.load_quantised(kind.small, kind.form)
    return (
        model if dtype is None else small.load_file(kind.small, _meant(model, dtype), dtype=dtype)
    )


def _prompt(name: str, *, seed: int, tokens: int | None) -> list[Any]:
    """A CONDITIONING made by hand, on the CPU."""
    import torch

    kind = TRANSFORMERS[name.removeprefix(SMALL)]
    if name.startswith(SMALL):
        from warmgraph_tools import small_transformers

        found: list[Any] = small_transformers.conditioning(kind.small, tokens or 13, seed=seed)
        return found
    tokens = tokens or kind.tokens
    generator = torch.Generator().manual_seed(seed)
    # 1000 times this is a number of bfloat16: else eager itself would be far from float32.
    facts: dict[str, Any] = {"guidance": 4.0}
    if kind.pooled is not None:
        facts["pooled_output"] = torch.randn(1, kind.pooled, generator=generator)
    if kind.masked:
        facts["attention_mask"] = torch.ones(1, tokens, dtype=torch.long)
    return [[torch.randn(1, tokens, kind.width, generator=generator), facts]]
