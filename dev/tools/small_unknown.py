"""Settings of small diffusion transformers that no family knows of, as the host's detection would
read them from files: `small_kinds` names the models.
"""

from __future__ import annotations

MAGE_FLOW = {
    "image_model": "mage_flow",
    "in_channels": 128,
    "num_layers": 2,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
}
LENS = {
    "image_model": "lens",
    "in_channels": 128,
    "out_channels": 32,
    "num_layers": 2,
    "num_attention_heads": 2,
    "enc_hidden_dim": 64,
    "multi_layer_encoder_feature": True,
    "selected_layer_index": (0, 1),
}
JOY_IMAGE = {
    "image_model": "joyimage",
    "in_channels": 16,
    "hidden_size": 256,
    "patch_size": [1, 2, 2],
    "num_layers": 2,
    "num_attention_heads": 2,
    "text_dim": 64,
}
BOOGU = {
    "image_model": "boogu",
    "hidden_size": 256,
    "num_layers": 2,
    "num_double_stream_layers": 2,
    "num_refiner_layers": 2,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "axes_dim_rope": (32, 48, 48),
    "instruction_feat_dim": 64,
}
PIXELDIT = {
    "image_model": "pixeldit_t2i",
    "num_groups": 2,
    "hidden_size": 128,
    "pixel_attn_hidden_size": 128,
    "pixel_num_groups": 2,
    "patch_depth": 2,
    "pixel_depth": 2,
    "patch_size": 2,
    "txt_embed_dim": 64,
}
#: The last of its blocks takes what the first one gave, too.
HYDIT = {
    "image_model": "hydit",
    "depth": 4,
    "hidden_size": 256,
    "text_states_dim": 64,
    "text_states_dim_t5": 64,
}
COGVIDEO = {
    "image_model": "cogvideox",
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "time_embed_dim": 64,
    "num_layers": 2,
    "in_channels": 16,
    "patch_size": 2,
    "text_embed_dim": 64,
    "use_learned_positional_embeddings": False,
    "use_rotary_positional_embeddings": True,
}
HUNYUAN_3D = {
    "image_model": "hunyuan3d2",
    "in_channels": 64,
    "context_in_dim": 64,
    "hidden_size": 256,
    "mlp_ratio": 4.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "qkv_bias": True,
    "guidance_embed": False,
}
TRIPOSPLAT = {
    "image_model": "triposplat",
    "q_token_length": 64,
    "model_channels": 128,
    "cond_channels": 64,
    "num_blocks": 2,
}
STABLE_AUDIO = {
    "audio_model": "dit1.0",
    "global_cond_dim": 1536,
    "project_cond_tokens": False,
    "cond_token_dim": 768,
    "embed_dim": 768,
    "num_heads": 12,
    "depth": 2,
    "timestep_features_type": "learned",
}
ACE_STEP = {
    "audio_model": "ace1.5",
    "hidden_size": 256,
    "text_hidden_dim": 64,
    "intermediate_size": 256,
    "num_heads": 2,
    "num_kv_heads": 1,
    "num_dit_layers": 4,
    "num_lyric_layers": 2,
    "num_timbre_layers": 2,
    "num_tokenizer_layers": 2,
    "sliding_window": 8,
    "fsq_dim": 256,
    "encoder_hidden_size": 256,
    "encoder_intermediate_size": 256,
    "encoder_num_heads": 2,
}
