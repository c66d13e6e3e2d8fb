"""What the small files of LTX-2 and MiniMax H3 hold beside the transformer: VAEs of video and of
audio, a vocoder, text encoders and what makes a latent larger, with random weights.

Those of H3, and text encoders, need `narrow_audio_video.py` registered in the host that loads them.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from . import checkpoints, small_transformers
from .checkpoints import Random, Weights

#: Widths that the file of an LTX names, of a kind of `small_transformers`.
LTX = "ltx23_wide"
_VIDEO_VAE = {
    "dims": 3,
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 128,
    "encoder_blocks": [
        ["res_x", {"num_layers": 1}],
        ["compress_space_res", {"multiplier": 2}],
        ["compress_time_res", {"multiplier": 2}],
        ["compress_all_res", {"multiplier": 2}],
        ["compress_all_res", {"multiplier": 1}],
        ["res_x", {"num_layers": 1}],
    ],
    "decoder_blocks": [  # from the image's side; the host looks for a layer at the other one
        ["res_x", {"num_layers": 1, "inject_noise": False}],
        ["compress_space", {"multiplier": 2}],
        ["compress_time", {"multiplier": 2}],
        ["compress_all", {"multiplier": 1}],
        ["compress_all", {"multiplier": 1}],
        ["res_x", {"num_layers": 1, "inject_noise": False}],
    ],
    "norm_layer": "pixel_norm",
    "patch_size": 4,
    "latent_log_var": "uniform",
    "causal_decoder": False,
    "timestep_conditioning": False,
    "encoder_base_channels": 16,
    "decoder_base_channels": 16,
}
_AUDIO_VAE = {
    "model": {
        "params": {
            "sampling_rate": 16000,
            "ddconfig": {
                "double_z": True,
                "mel_bins": 64,
                "z_channels": 8,
                "resolution": 256,
                "downsample_time": False,
                "in_channels": 2,
                "out_ch": 2,
                "ch": 16,
                "ch_mult": [1, 2, 2],
                "num_res_blocks": 1,
                "attn_resolutions": [],
                "dropout": 0.0,
                "mid_block_add_attention": False,
                "norm_type": "pixel",
                "causality_axis": "height",
            },
        }
    },
    "preprocessing": {"stft": {"filter_length": 1024, "hop_length": 160}},
}
_VOCODER = {"upsample_initial_channel": 64, "resblock_kernel_sizes": [3]}
_VOCODER["resblock_dilation_sizes"] = [[1, 3, 5]]
_UPSAMPLER = {
    "_class_name": "LatentUpsampler",
    "in_channels": 128,
    "mid_channels": 32,
    "num_blocks_per_stage": 1,
    "dims": 3,
    "spatial_upsample": True,
    "temporal_upsample": False,
}
#: What the files say of themselves.
CHECKPOINT_METADATA = {
    "config": json.dumps(
        {
            "transformer": {
                name: value
                for name, value in small_transformers.KINDS[LTX].settings.items()
                if name != "image_model"
            },
            "vae": _VIDEO_VAE,
            "audio_vae": _AUDIO_VAE,
            "vocoder": _VOCODER,
        }
    )
}
UPSAMPLER_METADATA = {"config": json.dumps(_UPSAMPLER)}


def ltx_checkpoint(transformer: Weights, random: Random) -> Weights:
    """All that stands in one file of LTX-2, of a transformer's weights."""
    from comfy.ldm.lightricks.vae.causal_audio_autoencoder import CausalAudioAutoencoder
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE
    from comfy.ldm.lightricks.vocoders.vocoder import Vocoder

    parts = {
        "model.diffusion_model.": transformer,
        "vae.": _like(random, lambda: VideoVAE(config=_VIDEO_VAE)),
        "audio_vae.": _like(random, lambda: CausalAudioAutoencoder(config=_AUDIO_VAE)),
        "vocoder.": _like(random, lambda: Vocoder(config=_VOCODER)),
        "text_embedding_projection.": _projection(random),
    }
    return {prefix + name: value for prefix, part in parts.items() for name, value in part.items()}


def _projection(random: Random) -> Weights:
    """From Gemma's layers to the widths of both streams."""
    import comfy.ops
    from comfy.text_encoders import lt

    from .narrow_audio_video import small_gemma

    with small_gemma(*_streams()):
        return _like(
            random,
            lambda: lt.DualLinearProjection(0, 0, 0, operations=comfy.ops.disable_weight_init),
        )


def _streams() -> tuple[int, int]:
    settings = small_transformers.KINDS[LTX].settings
    return settings["cross_attention_dim"], settings["audio_cross_attention_dim"]


def gemma(random: Random) -> Weights:
    """LTX-2's text encoder, without its tokenizer."""
    import comfy.ops
    from comfy.text_encoders import llama

    from .narrow_audio_video import GEMMA, small_gemma

    operations = comfy.ops.disable_weight_init
    with small_gemma(*_streams()):
        return _like(random, lambda: llama.Gemma3_12B(GEMMA, None, "meta", operations))


def qwen(random: Random) -> Weights:
    """H3's text encoder, which looks at images, too."""
    import comfy.ops
    from comfy.text_encoders import minimax

    from .narrow_audio_video import QWEN, small_qwen

    operations = comfy.ops.disable_weight_init
    with small_qwen():
        return _like(random, lambda: minimax.MiniMaxQwen3VL(QWEN, None, "meta", operations))


def upsampler(random: Random) -> Weights:
    """What doubles the sides of a latent of LTX-2."""
    import comfy.ops
    from comfy.ldm.lightricks.latent_upsampler import LatentUpsampler

    operations = comfy.ops.disable_weight_init
    return _like(random, lambda: LatentUpsampler.from_config(_UPSAMPLER, operations))


def h3_video_vae(random: Random) -> Weights:
    """H3's VAE of video."""
    from comfy.ldm.minimax import vae

    from .narrow_audio_video import small_h3_vaes

    with small_h3_vaes():
        weights = _like(random, vae.MiniMaxH3VideoVAE)
    weights["latents_mean"] = torch.tensor(vae.LATENTS_MEAN)
    weights["latents_std"] = torch.tensor(vae.LATENTS_STD)
    return weights


def h3_audio_vae(random: Random) -> Weights:
    """H3's VAE of audio, in float32 as its file has it."""
    from comfy.ldm.minimax import audio_vae

    from .narrow_audio_video import small_h3_vaes

    with small_h3_vaes():
        return _like(random, audio_vae.MiniMaxH3AudioVAE)


def _like(random: Random, build: Any) -> Weights:
    """Random weights of a module; what latents are shifted and scaled by leaves them as they are,
    and filters let low tones through.
    """
    weights = random.like(checkpoints.shapes_of(build))
    for name, value in weights.items():
        if name.endswith(("std-of-means", "latents_std")):
            weights[name] = torch.ones_like(value)
        elif name.endswith(("mean-of-means", "latents_mean", "zero_k_bias")):
            weights[name] = torch.zeros_like(value)
        elif name.endswith("filter"):
            weights[name] = _lowpass(value)
    return weights


def _lowpass(filter_: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(filter_.shape[-1] + 2)[1:-1]
    return (window / window.sum()).expand_as(filter_).to(filter_.dtype).contiguous()
