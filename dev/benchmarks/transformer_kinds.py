"""Which diffusion transformers are measured at full size: what the host's own detection reads from
a file of each, in which formats, and their small twins of `dev/tools/` for a smoke run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_FLUX: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "vec_in_dim": 768,
    "context_in_dim": 4096,
    "hidden_size": 3072,
    "mlp_ratio": 4.0,
    "num_heads": 24,
    "depth": 19,
    "depth_single_blocks": 38,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
}
_KLEIN: dict[str, Any] = {
    "in_channels": 128,
    "out_channels": 128,
    "patch_size": 1,
    "vec_in_dim": None,
    "context_in_dim": 7680,
    "hidden_size": 3072,
    "mlp_ratio": 3.0,
    "num_heads": 24,
    "depth": 5,
    "depth_single_blocks": 20,
    "axes_dim": [32, 32, 32, 32],
    "theta": 2000,
    "qkv_bias": False,
    "ops_bias": False,
    "guidance_embed": False,
    "global_modulation": True,
    "mlp_silu_act": True,
    "default_ref_method": "index",
    "ref_index_scale": 10.0,
    "txt_ids_dims": [3],
}
_FLUX2: dict[str, Any] = {
    **_KLEIN,
    "context_in_dim": 15360,
    "hidden_size": 6144,
    "num_heads": 48,
    "depth": 8,
    "depth_single_blocks": 48,
    "guidance_embed": True,
}
_ZIMAGE: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 16,
    "dim": 3840,
    "cap_feat_dim": 2560,
    "n_layers": 30,
    "qk_norm": True,
    "n_heads": 30,
    "n_kv_heads": 30,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}
_WAN: dict[str, Any] = {
    "model_type": "t2v",
    "in_dim": 16,
    "out_dim": 16,
    "dim": 1536,
    "ffn_dim": 8960,
    "num_heads": 12,
    "num_layers": 30,
}
_WAN_14B: dict[str, Any] = {
    **_WAN,
    "dim": 5120,
    "ffn_dim": 13824,
    "num_heads": 40,
    "num_layers": 40,
}
_LTX23: dict[str, Any] = {
    "num_layers": 48,
    "rope_type": "split",
    "use_middle_indices_grid": True,
    "causal_temporal_positioning": True,
    "connector_num_layers": 1,
    "apply_gated_attention": True,
    "cross_attention_adaln": True,
    "caption_proj_before_connector": True,
    "caption_projection_first_linear": False,
    "av_ca_timestep_scale_multiplier": 1000.0,
}
#: What ComfyUI 0.33 added for it.
_LTX25 = {
    **_LTX23,
    "ff_bias": False,
    "audio_ff_bias": False,
    "use_keyframes_abs_pos_embedding": True,
}
_H3: dict[str, Any] = {"adaln_curve_grid": 1001, "time_embed_dim": 16}


#: Which no ComfyUI before 0.37 has.
_QWEN21 = {
    "in_channels": 64,
    "out_channels": 64,
    "num_layers": 32,
    "attention_head_dim": 128,
    "num_attention_heads": 32,
    "context_in_dim": 4096,
    "mlp_ratio": 3,
    "axes_dims_rope": (16, 56, 56),
}


_AURA: dict[str, Any] = {"max_seq": 96 * 96, "n_layers": 36, "n_double_layers": 4}
_KANDINSKY: dict[str, Any] = {"num_visual_blocks": 32, "num_text_blocks": 2}
_OMNIGEN: dict[str, Any] = {
    "axes_dim_rope": [40, 40, 40],
    "axes_lens": [1024, 1664, 1664],
    "hidden_size": 2520,
    "num_attention_heads": 21,
    "num_kv_heads": 7,
    "num_layers": 32,
    "text_feat_dim": 2048,
    "timestep_scale": 1000.0,
}


class Sounds(NamedTuple):
    """What a model of video and audio makes beside the video.

    Attributes:
        channels: of the video's latent.
        before: sizes of the audio's latent between batch and length; `after` it: those behind.
        per_frame: its length for each frame of the video's latent.
    """

    channels: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    per_frame: float


_OF_LTX = Sounds(128, (8,), (16,), 126 / 16)
_OF_H3 = Sounds(24, (32, 2), (), 124 / 37)


class Transformer(NamedTuple):
    """One model of people's: how it is made, and how they run it.

    Attributes:
        root: the host's class of it, "module:Class".
        settings: what that takes.
        small: its twin in `dev/tools/`.
        width: of a text's tokens.
        tokens: of a text, as its text encoder gives them.
        blocks: the lists of modules that people's compile nodes take one by one.
        pooled: width of the pooled text, if it takes one.
        cfg: guidance; 1 runs one prompt.
        dtype: of the files that people have.
        form: that such a file's blocks are quantised in, of `dev/tools/quantised.py`, or of
            `dev/tools/gguf_files.py`.
        sounds: what it makes beside a video.
        tells: whether its file holds its settings, for the host does not tell them by its weights.
        masked: whether the host calls it with a mask of the text alone.
    """

    root: str
    settings: dict[str, Any]
    small: str
    width: int
    tokens: int
    blocks: tuple[str, ...]
    pooled: int | None = None
    cfg: float = 1.0
    dtype: str = "bfloat16"
    form: str | None = None
    sounds: Sounds | None = None
    tells: bool = False
    masked: bool = False


#: At the end of a file's name: of a model's other checkpoint.
SECOND = "-second"
#: Before the name of a small twin, for a smoke run.
SMALL = "small_"
TRANSFORMERS = {
    "zimage": Transformer(
        "comfy.ldm.lumina.model:NextDiT", _ZIMAGE, "zimage", 2560, 128, ("layers",)
    ),
    "flux1": Transformer(
        "comfy.ldm.flux.model:Flux",
        _FLUX,
        "flux1",
        4096,
        512,
        ("double_blocks", "single_blocks"),
        pooled=768,
    ),
    "klein4b": Transformer(
        "comfy.ldm.flux.model:Flux",
        _KLEIN,
        "flux2",
        7680,
        512,
        ("double_blocks", "single_blocks"),
    ),
    "flux2": Transformer(
        "comfy.ldm.flux.model:Flux",
        _FLUX2,
        "flux2",
        15360,
        512,
        ("double_blocks", "single_blocks"),
    ),
    "qwen": Transformer(
        "comfy.ldm.qwen_image.model:QwenImageTransformer2DModel",
        {"in_channels": 64, "num_layers": 60},
        "qwen",
        3584,
        128,
        ("transformer_blocks",),
    ),
    "krea2": Transformer(
        "comfy.ldm.krea2.model:SingleStreamDiT", {}, "krea", 12 * 2560, 128, ("blocks",)
    ),
    "wan1_3b": Transformer(
        "comfy.ldm.wan.model:WanModel", _WAN, "wan", 4096, 512, ("blocks",), dtype="float16"
    ),
    "wan14b": Transformer(
        "comfy.ldm.wan.model:WanModel", _WAN_14B, "wan", 4096, 512, ("blocks",), dtype="float16"
    ),
    "qwen21": Transformer(
        "comfy.ldm.qwen_image21.model:QwenImage21Transformer2DModel",
        _QWEN21,
        "qwen21",
        4096,
        256,
        ("transformer_blocks",),
    ),
    "ltx23": Transformer(
        "comfy.ldm.lightricks.av_model:LTXAVModel",
        _LTX23,
        "ltx23",
        4096 + 2048,
        1024,
        ("transformer_blocks",),
        sounds=_OF_LTX,
        tells=True,
    ),
    "h3": Transformer(
        "comfy.ldm.minimax.model:MiniMaxH3Model",
        _H3,
        "h3_curves",
        5120,
        200,
        ("blocks",),
        sounds=_OF_H3,
    ),
    "aura": Transformer(
        "comfy.ldm.aura.mmdit:MMDiT", _AURA, "aura", 2048, 256, ("double_layers", "single_layers")
    ),
    "kandinsky": Transformer(
        "comfy.ldm.kandinsky5.model:Kandinsky5",
        _KANDINSKY,
        "kandinsky",
        3584,
        128,
        ("visual_transformer_blocks",),
        pooled=768,
    ),
    "omnigen": Transformer(
        "comfy.ldm.omnigen.omnigen2:OmniGen2Transformer2DModel",
        _OMNIGEN,
        "omnigen",
        2048,
        128,
        ("layers",),
        masked=True,
    ),
}
TRANSFORMERS["ltx25"] = TRANSFORMERS["ltx23"]._replace(settings=_LTX25, small="ltx25")
#: Of so few blocks that the same file computed in float32 fits, too.
FEW = 4
TRANSFORMERS |= {
    f"{name}_few": each._replace(settings={**each.settings, "num_layers": FEW})
    for name, each in TRANSFORMERS.items()
    if each.sounds is not None
}
#: Quantised files of these, and of which format.
QUANTISED = {
    "zimage_int8": ("zimage", "int8_convrot"),
    "flux1_int8": ("flux1", "int8_convrot"),
    "flux1_fp8": ("flux1", "fp8_e4m3fn"),
    "flux1_mxfp8": ("flux1", "mxfp8"),
    "flux1_nvfp4": ("flux1", "nvfp4"),
    "flux2_fp8": ("flux2", "fp8_e4m3fn"),
    "qwen_fp8": ("qwen", "fp8_e4m3fn"),
    "qwen21_int8": ("qwen21", "int8_convrot"),
    "qwen21_fp8": ("qwen21", "fp8_e4m3fn"),
    "wan14b_int8": ("wan14b", "int8_convrot"),
    "wan14b_fp8": ("wan14b", "fp8_e4m3fn"),
    "ltx23_fp8": ("ltx23", "fp8_e4m3fn"),
    "ltx23_few_fp8": ("ltx23_few", "fp8_e4m3fn"),
    "ltx25_int8": ("ltx25", "int8_convrot"),
    "h3_int8": ("h3", "int8_convrot"),
    "h3_few_int8": ("h3_few", "int8_convrot"),
}
#: GGUF files of these, in which format, and what the files say that they are.
GGUF = {"flux1_gguf": ("flux1", "Q4_K", "flux")}
#: Small twins of these whose widths a group of rotated elements divides.
_WIDE = {"ltx23": "ltx23_wide", "ltx25": "ltx23_wide", "h3": "h3_curves", "qwen21": "qwen21"}
for _name, (_base, _form) in QUANTISED.items():
    # The host's detection knows a quantised small Flux or Wan alone.
    _small = "wan" if _base.startswith("wan") else "flux1"
    _small = _WIDE.get(_base.removesuffix("_few"), _small)
    TRANSFORMERS[_name] = TRANSFORMERS[_base]._replace(form=_form, small=_small)
for _name, (_base, _form, _) in GGUF.items():
    TRANSFORMERS[_name] = TRANSFORMERS[_base]._replace(form=_form, small="wan")


def suffix(name: str) -> str:
    """Return what the name of a model's file ends with."""
    return ".gguf" if name in GGUF else ".safetensors"
