"""Settings of small diffusion transformers, as the host's detection would read them from files."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import small_unknown as unknown

_FLUX = {
    "image_model": "flux",
    "axes_dim": [16, 56, 56],
    "num_heads": 2,
    "mlp_ratio": 4.0,
    "theta": 10000,
    "out_channels": 16,
    "qkv_bias": True,
    "txt_ids_dims": [],
    "in_channels": 16,
    "hidden_size": 256,
    "context_in_dim": 64,
    "patch_size": 2,
    "vec_in_dim": 32,
    "depth": 2,
    "depth_single_blocks": 2,
    "guidance_embed": True,
}
#: Beside the latent it takes that of an image, and a mask.
_FLUX_FILL = {**_FLUX, "in_channels": 96}
_FLUX2 = {
    "image_model": "flux2",
    "axes_dim": [32, 32, 32, 32],
    "num_heads": 2,
    "mlp_ratio": 3.0,
    "theta": 2000,
    "out_channels": 128,
    "global_modulation": True,
    "mlp_silu_act": True,
    "qkv_bias": False,
    "ops_bias": False,
    "default_ref_method": "index",
    "ref_index_scale": 10.0,
    "txt_ids_dims": [3],
    "in_channels": 128,
    "hidden_size": 256,
    "context_in_dim": 64,
    "patch_size": 1,
    "vec_in_dim": None,
    "depth": 2,
    "depth_single_blocks": 2,
    "guidance_embed": False,
}
_NEXTDIT = {
    "image_model": "lumina2",
    "patch_size": 2,
    "in_channels": 16,
    "cap_feat_dim": 64,
    "n_layers": 2,
    "qk_norm": True,
    "n_heads": 2,
}
_ZIMAGE = {
    **_NEXTDIT,
    "dim": 256,
    "n_kv_heads": 2,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}
_LUMINA2 = {
    **_NEXTDIT,
    "dim": 192,
    "n_kv_heads": 1,
    "axes_dims": [32, 32, 32],
    "axes_lens": [300, 512, 512],
    "rope_theta": 10000.0,
    "ffn_dim_multiplier": 4.0,
}


_QWEN = {
    "image_model": "qwen_image",
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "default_ref_method": "index_timestep_zero",
}
_QWEN_LAYERED = {
    **_QWEN,
    "use_additional_t_cond": True,
    "default_ref_method": "negative_index",
}
_QWEN21 = {
    "image_model": "qwen_image_2.1",
    "in_channels": 64,
    "out_channels": 64,
    "num_layers": 2,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "context_in_dim": 64,
}
_KREA = {
    "image_model": "krea2",
    "features": 256,
    "heads": 2,
    "kvheads": 1,
    "layers": 2,
    "channels": 16,
    "patch": 2,
    "txtdim": 32,
    "txtlayers": 3,
    "txtheads": 2,
    "txtkvheads": 2,
}
_WAN = {
    "image_model": "wan2.1",
    "model_type": "t2v",
    "patch_size": (1, 2, 2),
    "text_dim": 64,
    "in_dim": 16,
    "out_dim": 16,
    "dim": 256,
    "ffn_dim": 256,
    "num_heads": 2,
    "num_layers": 2,
}
_WAN_IMAGE = {**_WAN, "model_type": "i2v", "in_dim": 36}
_WAN_5B = {**_WAN, "in_dim": 48, "out_dim": 48}
_WAN_VACE = {**_WAN, "model_type": "vace", "vace_layers": 2, "vace_in_dim": 96}
_WAN_CAMERA = {**_WAN, "model_type": "camera_2.2", "in_dim": 36}
# Its face blocks come after every fifth block.
_WAN_ANIMATE = {**_WAN, "model_type": "animate", "in_dim": 36, "num_layers": 5}
_WAN_S2V = {**_WAN, "model_type": "s2v", "audio_dim": 64, "audio_inject_layers": [0]}
_WAN_HUMO = {**_WAN, "model_type": "humo"}
_WAN_DANCER = {**_WAN, "model_type": "wandancer", "in_dim": 36, "audio_inject_layers": [0]}
_WAN_CAUSAL = {**_WAN, "causal_ar": True}
_WAN_ANIMATE2 = {**_WAN, "model_type": "animate2", "in_dim": 36}
_WAN_SCAIL = {**_WAN, "model_type": "scail", "in_dim": 20}
_WAN_SCAIL2 = {**_WAN_SCAIL, "model_type": "scail2"}
_CHROMA = {
    "image_model": "chroma",
    "in_channels": 64,
    "context_in_dim": 64,
    "hidden_size": 256,
    "mlp_ratio": 4.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "in_dim": 64,
    "out_dim": 256,
    "hidden_dim": 64,
    "n_layers": 1,
    "txt_ids_dims": [],
    "vec_in_dim": None,
    "out_channels": 64,
}
_SD3 = {
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "depth": 4,  # which gives the width, too
    "input_size": None,
    "adm_in_channels": 32,
    "context_embedder_config": {
        "target": "torch.nn.Linear",
        "params": {"in_features": 64, "out_features": 256},
    },
    "num_patches": 64 * 64,
    "pos_embed_max_size": 64,
    "pos_embed_scaling_factor": None,
    "qk_norm": "rms",
    "x_block_self_attn_layers": [0],
}
_HUNYUAN = {
    "image_model": "hunyuan_video",
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "vec_in_dim": 32,
    "axes_dim": [16, 56, 56],
    "context_in_dim": 64,
    "hidden_size": 256,
    "mlp_ratio": 4.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "theta": 256,
    "qkv_bias": True,
    "guidance_embed": True,
    "byt5": False,
    "meanflow": False,
    "meanflow_sum": False,
    "use_cond_type_embedding": False,
    "vision_in_dim": None,
}
_HUNYUAN_15 = {
    **_HUNYUAN,
    "in_channels": 65,
    "out_channels": 32,
    "patch_size": [1, 1, 1],
    "vec_in_dim": None,
    "guidance_embed": False,
    "byt5": True,
    "meanflow_sum": True,
    "use_cond_type_embedding": True,
    "vision_in_dim": 1152,
}
_HUNYUAN_IMAGE = {
    **_HUNYUAN,
    "in_channels": 64,
    "out_channels": 64,
    "patch_size": [1, 1],
    "axes_dim": [64, 64],
    "vec_in_dim": None,
    "guidance_embed": False,
    "byt5": True,
}
_HUNYUAN_FLOW = {**_HUNYUAN, "meanflow": True}
_COSMOS = {
    "image_model": "cosmos",
    "max_img_h": 240,
    "max_img_w": 240,
    "max_frames": 128,
    "in_channels": 16,
    "out_channels": 16,
    "patch_spatial": 2,
    "patch_temporal": 1,
    "model_channels": 256,
    "block_config": "FA-CA-MLP",
    "concat_padding_mask": True,
    "crossattn_emb_channels": 64,
    "pos_emb_cls": "rope3d",
    "pos_emb_learnable": False,
    "pos_emb_interpolation": "crop",
    "block_x_format": "THWBD",
    "affline_emb_norm": True,
    "use_adaln_lora": True,
    "adaln_lora_dim": 32,
    "num_blocks": 2,
    "num_heads": 2,
    "extra_per_block_abs_pos_emb": True,
    "extra_per_block_abs_pos_emb_type": "learnable",
    "rope_h_extrapolation_ratio": 1.0,
    "rope_w_extrapolation_ratio": 1.0,
    "rope_t_extrapolation_ratio": 2.0,
}
_PREDICT2 = {
    **{name: value for name, value in _COSMOS.items() if not name.startswith(("block_", "aff"))},
    "image_model": "cosmos_predict2",
    "pos_emb_learnable": True,
    "min_fps": 1,
    "max_fps": 30,
    "extra_per_block_abs_pos_emb": False,
    "rope_h_extrapolation_ratio": 4.0,
    "rope_w_extrapolation_ratio": 4.0,
    "rope_t_extrapolation_ratio": 1.0,
    "extra_h_extrapolation_ratio": 1.0,
    "extra_w_extrapolation_ratio": 1.0,
    "extra_t_extrapolation_ratio": 1.0,
    "rope_enable_fps_modulation": False,
}
del _PREDICT2["extra_per_block_abs_pos_emb_type"]
_PREDICT2_VIDEO = {**_PREDICT2, "in_channels": 17}
_ANIMA = {**_PREDICT2, "image_model": "anima"}
_AURA = {
    "cond_seq_dim": 64,
    "max_seq": 64 * 64,
    "n_double_layers": 2,
    "n_layers": 4,
    "dim": 256,
    "n_heads": 2,
    "global_conddim": 256,
}
_KANDINSKY = {
    "image_model": "kandinsky5",
    "in_text_dim": 64,
    "in_text_dim2": 32,
    "time_dim": 64,
    "model_dim": 256,
    "ff_dim": 512,
    "visual_embed_dim": 132,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (16, 24, 24),
}
_OMNIGEN = {
    "image_model": "omnigen2",
    "axes_dim_rope": [32, 48, 48],
    "axes_lens": [1024, 1664, 1664],
    "ffn_dim_multiplier": None,
    "hidden_size": 256,
    "in_channels": 16,
    "multiple_of": 256,
    "norm_eps": 1e-5,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "out_channels": None,
    "patch_size": 2,
    "text_feat_dim": 64,
    "timestep_scale": 1000.0,
}
_ERNIE = {
    "image_model": "ernie",
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_layers": 2,
    "ffn_hidden_size": 512,
    "text_in_dim": 64,
}
_LTX = {
    "in_channels": 128,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "cross_attention_dim": 128,
    "caption_channels": 96,
}
_LTXV = {**_LTX, "image_model": "ltxv"}
_LTX2 = {
    **_LTX,
    "image_model": "ltxav",
    "audio_in_channels": 128,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 32,
    "audio_cross_attention_dim": 64,
    "connector_num_layers": 1,
    "connector_num_attention_heads": 2,
    "connector_attention_head_dim": 48,
    "rope_type": "split",
    "frequencies_precision": "float64",
    "use_middle_indices_grid": True,
    "causal_temporal_positioning": True,
    "timestep_scale_multiplier": 1000.0,
    "av_ca_timestep_scale_multiplier": 1000.0,
}
#: The text is projected in front of the connectors, its attention is modulated, heads have gates.
_LTX23 = {
    **_LTX2,
    "apply_gated_attention": True,
    "cross_attention_adaln": True,
    "caption_proj_before_connector": True,
    "caption_projection_first_linear": False,
    "connector_apply_gated_attention": True,
    "connector_attention_head_dim": 64,
    "audio_connector_num_attention_heads": 2,
    "audio_connector_attention_head_dim": 32,
}
_LTX25 = {
    **_LTX23,
    "ff_bias": False,
    "audio_ff_bias": False,
    "use_keyframes_abs_pos_embedding": True,
}
#: Of widths that a group of rotated elements divides.
_LTX23_WIDE = {
    **_LTX23,
    "num_attention_heads": 4,
    "attention_head_dim": 128,
    "cross_attention_dim": 512,
    "audio_num_attention_heads": 4,
    "audio_attention_head_dim": 64,
    "audio_cross_attention_dim": 256,
    "connector_num_attention_heads": 4,
    "connector_attention_head_dim": 128,
    "audio_connector_num_attention_heads": 4,
    "audio_connector_attention_head_dim": 64,
}
_H3 = {
    "image_model": "minimax_h3",
    "hidden_size": 256,
    "num_layers": 2,
    "token_refiner_num_layers": 1,
    "num_attention_heads": 4,
    "attention_head_dim": 128,
    "ffn_hidden_size": 512,
    "latents_dim": 24,
    "audio_latents_dim": 32,
    "text_dim": 320,
    "timestep_input_dim": 64,
    "time_embed_hidden_size": 96,
    "time_embed_dim": 80,
}
#: A curve stands in the place of the timestep's embedding, as in most files.
_H3_CURVES = {**_H3, "adaln_curve_grid": 33, "time_embed_dim": 8}


class Small(NamedTuple):
    """A small model.

    Attributes:
        settings: what the host's detection would read from its file, were it larger.
        name: the host's for it.
        channels: of its latents.
        text: width of a text's tokens.
        is_video: whether its latents have frames.
        patch: what the sides of its latents must be multiples of.
        sounds: sizes of its audio's latent between batch and length, if it has one, and after it.
    """

    settings: dict[str, Any]
    name: str
    channels: int
    text: int
    is_video: bool = False
    patch: int = 1
    sounds: tuple[tuple[int, ...], tuple[int, ...]] | None = None


KINDS = {
    "flux1": Small(_FLUX, "Flux", 16, 64),
    "flux_fill": Small(_FLUX_FILL, "FluxInpaint", 16, 64),
    "flux2": Small(_FLUX2, "Flux2", 128, 64),
    "chroma": Small(_CHROMA, "Chroma", 16, 64),
    "zimage": Small(_ZIMAGE, "ZImage", 16, 64),
    "lumina2": Small(_LUMINA2, "Lumina2", 16, 64),
    "qwen": Small(_QWEN, "QwenImage", 16, 64, True),
    "qwen_layered": Small(_QWEN_LAYERED, "QwenImage", 16, 64, True),
    "qwen21": Small(_QWEN21, "QwenImage21", 64, 64),
    "krea": Small(_KREA, "Krea2", 16, 96),
    "wan": Small(_WAN, "WAN21_T2V", 16, 64, True),
    "wan_image": Small(_WAN_IMAGE, "WAN21_I2V", 16, 64, True),
    "wan_5b": Small(_WAN_5B, "WAN22_T2V", 48, 64, True),
    "wan_vace": Small(_WAN_VACE, "WAN21_Vace", 16, 64, True),
    "wan_camera": Small(_WAN_CAMERA, "WAN22_Camera", 16, 64, True),
    "wan_animate": Small(_WAN_ANIMATE, "WAN22_Animate", 16, 64, True),
    "wan_s2v": Small(_WAN_S2V, "WAN22_S2V", 16, 64, True),
    "wan_humo": Small(_WAN_HUMO, "WAN21_HuMo", 16, 64, True),
    "wan_dancer": Small(_WAN_DANCER, "WAN22_WanDancer", 16, 64, True),
    "wan_animate2": Small(_WAN_ANIMATE2, "WAN_Animate2", 16, 64, True),
    "wan_scail": Small(_WAN_SCAIL, "WAN21_SCAIL", 16, 64, True),
    "wan_scail2": Small(_WAN_SCAIL2, "WAN21_SCAIL2", 16, 64, True),
    "sd3": Small(_SD3, "SD3", 16, 64),
    "hunyuan": Small(_HUNYUAN, "HunyuanVideo", 16, 64, True, 2),
    "hunyuan_15": Small(_HUNYUAN_15, "HunyuanVideo15", 32, 64, True),
    "hunyuan_image": Small(_HUNYUAN_IMAGE, "HunyuanImage21", 64, 64),
    "hunyuan_flow": Small(_HUNYUAN_FLOW, "HunyuanVideo", 16, 64, True, 2),
    "cosmos": Small(_COSMOS, "CosmosT2V", 16, 64, True),
    "predict2": Small(_PREDICT2, "CosmosT2IPredict2", 16, 64, True),
    "predict2_video": Small(_PREDICT2_VIDEO, "CosmosI2VPredict2", 16, 64, True),
    "anima": Small(_ANIMA, "Anima", 16, 64, True),
    "aura": Small(_AURA, "AuraFlow", 4, 64),
    "kandinsky": Small(_KANDINSKY, "Kandinsky5", 16, 64, True),
    "omnigen": Small(_OMNIGEN, "Omnigen2", 16, 64),
    "ernie": Small(_ERNIE, "ErnieImage", 128, 64),
    "mage_flow": Small(unknown.MAGE_FLOW, "MageFlow", 128, 64),
    "lens": Small(unknown.LENS, "Lens", 128, 128),
    "joyimage": Small(unknown.JOY_IMAGE, "JoyImage", 16, 64, True),
    "boogu": Small(unknown.BOOGU, "Boogu", 16, 64),
    "pixeldit": Small(unknown.PIXELDIT, "PixelDiTT2I", 3, 64),
    "hydit": Small(unknown.HYDIT, "HunyuanDiT", 4, 64),
    "cogvideo": Small(unknown.COGVIDEO, "CogVideoX_T2V", 16, 64, True),
    "hunyuan_3d": Small(unknown.HUNYUAN_3D, "Hunyuan3Dv2", 64, 64),
    "triposplat": Small(unknown.TRIPOSPLAT, "TripoSplat", 16, 64),
    "stable_audio": Small(unknown.STABLE_AUDIO, "StableAudio", 64, 768),
    "ace_step": Small(unknown.ACE_STEP, "ACEStep15", 64, 64),
    "ltxv": Small(_LTXV, "LTXV", 128, 96, True),
    "ltx2": Small(_LTX2, "LTXAV", 128, 192, True, 1, ((8,), (16,))),
    "ltx23": Small(_LTX23, "LTXAV", 128, 192, True, 1, ((8,), (16,))),
    "ltx25": Small(_LTX25, "LTXAV", 128, 192, True, 1, ((8,), (16,))),
    "ltx23_wide": Small(_LTX23_WIDE, "LTXAV", 128, 768, True, 1, ((8,), (16,))),
    "h3": Small(_H3, "MiniMaxH3", 24, 320, True, 1, ((32, 2), ())),
    "h3_curves": Small(_H3_CURVES, "MiniMaxH3", 24, 320, True, 1, ((32, 2), ())),
}
#: Which makes a video frame by frame, by blocks that keep what they attended to.
CAUSAL_WAN = Small(_WAN_CAUSAL, "WAN21_CausalAR_T2V", 16, 64, True)
#: Those that have no regions, but whole steps to capture.
WHOLE = ("cosmos", "aura", "kandinsky", "omnigen", "ernie")
#: Those that no family knows of.
UNKNOWN = (
    *("mage_flow", "lens", "joyimage", "boogu", "pixeldit"),
    *("hydit", "cogvideo", "hunyuan_3d", "triposplat", "stable_audio", "ace_step"),
)
