"""Which small models there are, and how their UNets are laid out."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "image_size": 32,
    "use_checkpoint": False,
    "use_spatial_transformer": True,
    "legacy": False,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "use_temporal_attention": False,
    "use_temporal_resblock": False,
    "transformer_depth_middle": 1,
}
_SD15: dict[str, Any] = {  # two levels: every kind of block of the real one
    **_BASE,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 1],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "context_dim": 768,
    "use_linear_in_transformer": False,
    "adm_in_channels": None,
    "num_heads": 8,
    "num_head_channels": -1,
}
_NARROW15 = {**_SD15, "model_channels": 64, "context_dim": 64}
_NARROWXL: dict[str, Any] = {  # three levels, the first one without attention
    **_BASE,
    "model_channels": 64,
    "num_res_blocks": [1, 1, 1],
    "channel_mult": [1, 1, 1],
    "transformer_depth": [0, 1, 2],
    "transformer_depth_output": [0, 0, 1, 1, 1, 1],
    "context_dim": 128,
    "use_linear_in_transformer": True,
    "adm_in_channels": 64 + 6 * 256,
    "num_classes": "sequential",
    "num_heads": -1,
    "num_head_channels": 64,
}
UNETS: dict[str, dict[str, Any]] = {
    "sd15": _SD15,
    "narrow15": _NARROW15,
    "narrow15inpaint": {**_NARROW15, "in_channels": 9},
    "narrow20": {
        **_NARROW15,
        "use_linear_in_transformer": True,
        "num_heads": -1,
        "num_head_channels": 64,
    },
    "narrowxl": _NARROWXL,
    "narrowt2i15": {  # an adapter's features meet two blocks a level, of widths 64 and 128
        **_NARROW15,
        "num_res_blocks": [2, 2],
        "channel_mult": [1, 2],
        "transformer_depth": [1, 1, 1, 1],
        "transformer_depth_output": [1] * 6,
    },
    "narrowt2ixl": {
        **_NARROWXL,
        "num_res_blocks": [2, 2, 2],
        "channel_mult": [1, 2, 4],
        "transformer_depth": [0, 0, 1, 1, 1, 1],
        "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1],
    },
}
"""UNet configurations: exactly what the host's detection reads back from the weights."""
FLUX: dict[str, Any] = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "vec_in_dim": 768,
    "context_in_dim": 4096,
    "hidden_size": 128,
    "mlp_ratio": 4.0,
    "num_heads": 1,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
}
FOLDERS = dict.fromkeys(UNETS, "checkpoints") | {
    "lora": "loras",
    "locon": "loras",
    "controlnet": "controlnet",
    "controllora": "controlnet",
    "t2i": "controlnet",
    "flux": "diffusion_models",
}
"""Where each kind of file belongs below a models directory."""
