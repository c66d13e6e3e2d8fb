"""Test-only one-file pack: the host's own loaders take small files of the text encoders of LTX-2
and MiniMax H3, and of H3's VAEs, of which the host knows full size alone.

As `narrow_transformers.py`: a text encoder's file tells by its widths that it is small. H3's VAEs
are made without a look at the file: small in each server that has this pack, and elsewhere within
`small_h3_vaes`. LTX's VAEs need none of this, for their widths stand in their file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import comfy.sd
from comfy.ldm.minimax import audio_vae, vae
from comfy.text_encoders import llama, lt, qwen3vl

NODE_CLASS_MAPPINGS: dict[str, type] = {}

WIDTH = 64
_LLAMA = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
#: What differs from the host's configurations; layers are as many as it looks for.
GEMMA = {**_LLAMA, "vocab_size": 128}
QWEN = _LLAMA
_VISION = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
_GEMMA_VISION = {
    **llama.GEMMA3_VISION_CONFIG,
    **_VISION,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
}
_QWEN_VISION = {**_VISION, "num_heads": 1, "depth": 3, "deepstack_visual_indexes": [0, 1, 2]}

#: Of H3's VAEs; norms of the video's have 32 groups.
ENCODER = {"ch": 32, "ch_mult": (1,) * 6}
DECODER = {"num_layers": 2, "heads": 2}
AUDIO = {"encoder_dim": 8, "latent_dim": WIDTH, "decoder_dim": 128}

_PROJECTION = "text_embedding_projection.{}_aggregate_embed.bias"


def _width(file: Mapping[str, Any], name: str) -> int | None:
    return len(file[name]) if name in file else None


@contextlib.contextmanager
def small_gemma(video: int, audio: int) -> Iterator[None]:
    """Within, LTX-2's text encoder is made small, for streams of these widths."""
    projection = lt.DualLinearProjection

    def narrow(_in: int, _video: int, _audio: int, **rest: Any) -> Any:
        return projection((48 + 1) * WIDTH, video, audio, **rest)

    with _instead(
        (llama.Gemma3_12B_Config, "vision_config", _GEMMA_VISION),
        (lt, "DualLinearProjection", narrow),
    ):
        yield


@contextlib.contextmanager
def small_qwen() -> Iterator[None]:
    """Within, H3's text encoder looks at images with a small network."""
    with _instead((qwen3vl, "QWEN3VL_VISION", {"qwen3vl_32b": _QWEN_VISION})):
        yield


_H3_VAES = (
    (vae, "ViT3DDecoder", partial(vae.ViT3DDecoder, **DECODER)),
    (vae, "MiniMaxH3VideoVAE", partial(vae.MiniMaxH3VideoVAE, **ENCODER)),
    (audio_vae, "MiniMaxH3AudioVAE", partial(audio_vae.MiniMaxH3AudioVAE, **AUDIO)),
)


@contextlib.contextmanager
def small_h3_vaes() -> Iterator[None]:
    """Within, H3's VAEs are made small."""
    with _instead(*_H3_VAES):
        yield


@contextlib.contextmanager
def _instead(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Set these attributes, and put them back."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


_host_load = comfy.sd.load_text_encoder_state_dicts


def _load(state_dicts: Any, *, model_options: Any, **rest: Any) -> Any:
    """Load as the host does, a small text encoder of these two as a small one."""
    load: Callable[..., Any] = partial(_host_load, state_dicts, **rest)
    first, *others = state_dicts
    if _width(first, "model.norm.weight") == WIDTH and others:
        streams = [_width(others[0], _PROJECTION.format(of)) for of in ("video", "audio")]
        if None not in streams:
            with small_gemma(*streams):  # its configuration has no name
                return load(model_options={"_model_config": GEMMA, **model_options})
    is_h3s = "visual.deepstack_merger_list.0.norm.weight" in first
    if is_h3s and _width(first, "model.layers.0.input_layernorm.weight") == WIDTH:
        with small_qwen():
            return load(model_options={"qwen3vl_32b_model_config": QWEN, **model_options})
    return load(model_options=model_options)


comfy.sd.load_text_encoder_state_dicts = _load
if not __package__:  # imported by a server
    for owner, name, value in _H3_VAES:
        setattr(owner, name, value)
