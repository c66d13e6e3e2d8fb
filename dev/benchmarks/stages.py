"""Official templates by their stages: what encodes the text, what decodes, at which sizes, and how
many passes of the transformer are between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

#: LTX-2.3's VAEs, vocoder and upsampler as their files say of themselves.
LTX_VIDEO_VAE: dict[str, Any] = {
    "dims": 3,
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 128,
    "encoder_blocks": [
        ["res_x", {"num_layers": 4}],
        ["compress_space_res", {"multiplier": 2}],
        ["res_x", {"num_layers": 6}],
        ["compress_time_res", {"multiplier": 2}],
        ["res_x", {"num_layers": 4}],
        ["compress_all_res", {"multiplier": 2}],
        ["res_x", {"num_layers": 2}],
        ["compress_all_res", {"multiplier": 1}],
        ["res_x", {"num_layers": 2}],
    ],
    "decoder_blocks": [
        ["res_x", {"num_layers": 4}],
        ["compress_space", {"multiplier": 2}],
        ["res_x", {"num_layers": 6}],
        ["compress_time", {"multiplier": 2}],
        ["res_x", {"num_layers": 4}],
        ["compress_all", {"multiplier": 1}],
        ["res_x", {"num_layers": 2}],
        ["compress_all", {"multiplier": 2}],
        ["res_x", {"num_layers": 2}],
    ],
    "norm_layer": "pixel_norm",
    "patch_size": 4,
    "latent_log_var": "uniform",
    "causal_decoder": False,
    "timestep_conditioning": False,
    "spatial_padding_mode": "zeros",
    "encoder_base_channels": 128,
    "decoder_base_channels": 128,
}
LTX_AUDIO_VAE: dict[str, Any] = {
    "model": {
        "params": {
            "ddconfig": {
                "double_z": True,
                "mel_bins": 64,
                "z_channels": 8,
                "resolution": 256,
                "in_channels": 2,
                "out_ch": 2,
                "ch": 128,
                "ch_mult": [1, 2, 4],
                "num_res_blocks": 2,
                "attn_resolutions": [],
                "dropout": 0.0,
                "mid_block_add_attention": False,
                "norm_type": "pixel",
                "causality_axis": "height",
            },
            "sampling_rate": 16000,
        }
    },
    "preprocessing": {"stft": {"filter_length": 1024, "hop_length": 160}},
}
_BIGVGAN: dict[str, Any] = {
    "resblock": "AMP1",
    "activation": "snakebeta",
    "use_bias_at_final": False,
    "use_tanh_at_final": False,
}
LTX_VOCODER: dict[str, Any] = {
    "vocoder": {
        **_BIGVGAN,
        "upsample_initial_channel": 1536,
        "upsample_rates": [5, 2, 2, 2, 2, 2],
        "upsample_kernel_sizes": [11, 4, 4, 4, 4, 4],
    },
    "bwe": {
        **_BIGVGAN,
        "upsample_initial_channel": 512,
        "upsample_rates": [6, 5, 2, 2, 2],
        "upsample_kernel_sizes": [12, 11, 4, 4, 4],
        "input_sampling_rate": 16000,
        "output_sampling_rate": 48000,
        "n_fft": 512,
        "hop_length": 80,
        "num_mels": 64,
    },
}
LTX_UPSAMPLER: dict[str, Any] = {"in_channels": 128, "mid_channels": 1024, "dims": 3}


class Text(NamedTuple):
    """A text encoder, and what it is asked.

    Attributes:
        root: the host's class of it, "module:Class".
        layers: the setting that says how many blocks it has, of which people's file has `depth`.
        tokens: of a prompt, `padded` in front with others up to so many.
        prompts: how many are encoded.
        image: sides of what it looks at besides.
        small: settings for a smoke run.
    """

    root: str
    layers: str
    depth: int
    tokens: int
    prompts: int
    small: dict[str, Any]
    padded: int = 0
    image: tuple[int, int] | None = None


class Pass(NamedTuple):
    """A sampler's steps: `calls` of one step that was measured with the whole transformer.

    Attributes:
        case: whose result has it, in the row `row`.
    """

    name: str
    case: str
    row: str
    calls: int


class Template(NamedTuple):
    """A template's stages besides the transformer's passes, and these by the name of a run.

    Attributes:
        vae: of the images or video, a name in `tasks.stages`.
        size: width, height and frames of what is decoded; a still image has one.
        images: width, height and frames of what is encoded.
        tiled: what the node of the tiled decode is given, if it is that one.
        sound: of the audio's VAE, a name as well, and the sizes of its latent.
        upsampled: sizes of the latent that is made larger between two passes.
    """

    text: Text
    vae: str
    size: tuple[int, int, int]
    runs: dict[str, tuple[Pass, ...]]
    images: tuple[tuple[int, int, int], ...] = ()
    tiled: tuple[int, int, int, int] | None = None
    sound: tuple[str, tuple[int, ...]] | None = None
    upsampled: tuple[int, ...] | None = None


_NARROW: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_GEMMA = Text(
    "comfy.text_encoders.lt:Gemma3_12BModel",
    "num_hidden_layers",
    depth=48,
    tokens=200,
    padded=1024,
    prompts=2,
    small=_NARROW,
)
_QWEN_VL = Text(
    "comfy.text_encoders.minimax:MiniMaxH3ClipModel",
    "num_hidden_layers",
    depth=50,
    tokens=300,
    prompts=1,
    small=_NARROW,
)
_UMT5 = Text(
    "comfy.text_encoders.wan:UMT5XXlModel",
    "num_layers",
    depth=24,
    tokens=512,
    prompts=2,
    small={"d_model": 128, "d_ff": 128, "num_heads": 2},
)
_QWEN_4B = Text(
    "comfy.text_encoders.z_image:Qwen3_4BModel",
    "num_hidden_layers",
    depth=36,
    tokens=64,
    prompts=1,
    small=_NARROW,
)


def _h3(width: int, height: int, frames: int, sounds: int, row: str) -> Template:
    passes = {
        f"{steps} steps": (Pass("passes", "transformer_h3_int8", row, steps),) for steps in (20, 8)
    }
    return Template(
        _QWEN_VL._replace(image=(width, height)),
        "h3_video",
        (width, height, frames),
        passes,
        images=((width, height, 1),),
        sound=("h3_audio", (1, 32, 2, sounds)),
    )


#: Wan's step was measured at 832x480, which is 2.5 % less than the template's square; H3's sizes
#: are those of 0.4 megapixels in landscape.
TEMPLATES = {
    "ltx23_i2v": Template(
        _GEMMA,
        "ltx_video",
        (1280, 704, 121),
        {
            "8 and 3 steps": (
                Pass("first pass", "transformer_ltx23_fp8", "640x352x16x1x1", 8),
                Pass("second pass", "transformer_ltx23_fp8", "1280x704x16x1x1", 3),
            )
        },
        images=((640, 352, 1), (1280, 704, 1)),
        tiled=(768, 64, 4096, 4),
        sound=("ltx_audio", (1, 8, 126, 16)),
        upsampled=(1, 128, 16, 11, 20),
    ),
    "h3_i2v": _h3(896, 512, 56, 93, "896x512x17"),
    "h3_i2v_5s": _h3(864, 480, 124, 207, "864x480x37"),
    "wan22_i2v": Template(
        _UMT5,
        "wan",
        (640, 640, 81),
        {
            "20 steps with guidance": (Pass("passes", "transformer_wan14b_fp8", "832x480x21", 40),),
            "4 steps": (Pass("passes", "transformer_wan14b_fp8", "832x480x21", 4),),
        },
        images=((640, 640, 81),),
    ),
    "zimage": Template(
        _QWEN_4B,
        "flux",
        (1024, 1024, 1),
        {"8 steps": (Pass("passes", "transformer_zimage", "1024x1024x1", 8),)},
    ),
}
