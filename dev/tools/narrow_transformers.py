"""Test-only one-file pack: the host's own loaders take small files of transformers and of their
text encoders where its detection knows full size alone.

What a file is, how its weights are loaded, tokenizers and all that runs stay the host's. Copied
into `custom_nodes/` of a test server, or imported after the host's modules in this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import comfy.sd
from comfy import model_detection, supported_models
from comfy.text_encoders import qwen_vl

NODE_CLASS_MAPPINGS: dict[str, type] = {}

WIDTH = 64
_T5 = {"d_model": WIDTH, "d_ff": 2 * WIDTH, "d_kv": WIDTH, "num_heads": 1, "num_layers": 2}
_LLAMA = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
#: What differs from the host's configurations of text encoders, by its names for them.
ENCODERS: dict[str, dict[str, Any]] = {
    "clip_l": {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": 1,
        "num_hidden_layers": 2,
    },
    "t5xxl": _T5,
    "umt5xxl": {**_T5, "vocab_size": 128},
    "qwen3_4b": {**_LLAMA, "num_hidden_layers": 28},  # Flux 2 reads the 27th layer
    "qwen25_7b": {**_LLAMA, "num_hidden_layers": 2},
}
#: The part of Qwen 2.5 VL that looks at images.
VISION = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_heads": 1, "num_layers": 1}

_LAST_NORMS = (
    "text_model.final_layer_norm.weight",
    "encoder.final_layer_norm.weight",
    "model.norm.weight",
)
_ZIMAGE = {
    "n_heads": 2,
    "n_kv_heads": 2,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}


class NarrowZImage(supported_models.ZImage):
    """Z-Image of two heads."""

    unet_config: ClassVar[dict[str, Any]] = {**supported_models.ZImage.unet_config, "dim": 256}


class NarrowVision(qwen_vl.Qwen2VLVisionTransformer):
    """What looks at images for a text encoder, as narrow as that is."""

    def __init__(self, *, output_hidden_size: int, **rest: Any) -> None:
        narrow = VISION if output_hidden_size == WIDTH else {}
        super().__init__(output_hidden_size=output_hidden_size, **{**rest, **narrow})


_host_transformer = model_detection.detect_unet_config
_host_encoder = comfy.sd.detect_te_model
_host_load = comfy.sd.load_text_encoder_state_dicts


def _detect_transformer(file: Mapping[str, Any], prefix: str, metadata: Any = None) -> Any:
    """Detect as the host does, and the widths of a narrow Z-Image or Qwen-Image besides."""
    found = _host_transformer(file, prefix, metadata=metadata)
    kind = (found or {}).get("image_model")  # UNets have none
    if kind == "lumina2" and found["dim"] == NarrowZImage.unet_config["dim"]:
        found |= _ZIMAGE
    elif kind == "qwen_image":
        found["joint_attention_dim"] = len(file[f"{prefix}txt_norm.weight"])
        found["num_attention_heads"] = len(file[f"{prefix}img_in.bias"]) // 128
    return found


def _is_narrow(file: Mapping[str, Any]) -> bool:
    return any(name in file and len(file[name]) == WIDTH for name in _LAST_NORMS)


def _detect_encoder(file: Mapping[str, Any]) -> Any:
    """Detect as the host does, but for widths."""
    if _is_narrow(file):
        for name, found in {
            "encoder.final_layer_norm.weight": comfy.sd.TEModel.T5_XXL,
            "model.layers.0.self_attn.q_norm.weight": comfy.sd.TEModel.QWEN3_4B,
            "model.layers.0.self_attn.k_proj.bias": comfy.sd.TEModel.QWEN25_7B,
        }.items():
            if name in file:
                return found
    return _host_encoder(file)


def _load(state_dicts: Any, *, model_options: Any, **rest: Any) -> Any:
    """Load as the host does, with the configurations of narrow text encoders if it is one."""
    if any(map(_is_narrow, state_dicts)):
        sizes = {f"{name}_model_config": dict(changed) for name, changed in ENCODERS.items()}
        clip = {"model_config": dict(ENCODERS["clip_l"])}  # which the host adds lengths to
        model_options = {**sizes, **clip, **model_options}
    return _host_load(state_dicts, model_options=model_options, **rest)


qwen_vl.Qwen2VLVisionTransformer = NarrowVision
model_detection.detect_unet_config = _detect_transformer
comfy.sd.detect_te_model = _detect_encoder
comfy.sd.load_text_encoder_state_dicts = _load
supported_models.models.insert(0, NarrowZImage)  # before Lumina 2, which takes any width
