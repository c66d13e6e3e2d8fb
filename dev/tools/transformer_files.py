"""Write the small files that the shipped workflows of diffusion transformers ask for: random
weights under the names of the real files, which the host's own loaders accept.

They need `narrow_transformers.py` and `narrow_audio_video.py` registered in the host that loads
them.
"""

from __future__ import annotations

import io
import json
import string
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import checkpoints, small_audio_video, small_transformers
from .checkpoints import Random, Weights
from .quantised import is_of_a_block, quantised


class Kind(NamedTuple):
    """What a file holds.

    Attributes:
        folder: below a models directory.
        make: gives its weights.
        metadata: what it says of itself.
    """

    folder: str
    make: Callable[[Random], Weights]
    metadata: Mapping[str, str] | None = None


def ensure(models: Path, name: str) -> Path:
    """Return the path of the file of this name below `models`, written unless it is there."""
    kind = FILES[name]
    path = models / kind.folder / name
    if not path.is_file():
        random = Random(zlib.crc32(name.encode()), shared=False)
        checkpoints.write(kind.make(random), path, kind.metadata)
    return path


def _transformer(kind: str, **changed: Any) -> Callable[[Random], Weights]:
    def make(random: Random) -> Weights:
        seed = random.generator.initial_seed()
        return small_transformers.weights(kind, seed=seed, dtype=torch.float16, **changed)

    return make


def _quantised(
    kind: str, form: str, *, plain: str | None = None, **changed: Any
) -> Callable[[Random], Weights]:
    """Of blocks but their layers whose name holds `plain`."""

    def takes(name: str, weight: torch.Tensor) -> bool:
        return is_of_a_block(name, weight) and (plain is None or plain not in name)

    def make(random: Random) -> Weights:
        return quantised(_transformer(kind, **changed)(random), form, takes=takes)

    return make


def _lora(kind: str, *, rank: int = 4, **changed: Any) -> Callable[[Random], Weights]:
    def make(random: Random) -> Weights:
        found: Weights = {}
        for name, value in small_transformers.weights(kind, **changed).items():
            if "_blocks." in name and value.dim() == 2:
                stem = f"diffusion_model.{name.removesuffix('.weight')}"
                rows, columns = value.shape
                found[f"{stem}.lora_A.weight"] = random.normal((rank, columns), columns**-0.5)
                found[f"{stem}.lora_B.weight"] = random.normal((rows, rank), 0.2)
        return found

    return make


def _encoder(name: str) -> Callable[[Random], Weights]:
    """A text encoder of one of the host's classes."""

    def make(random: Random) -> Weights:
        import comfy.ops
        from comfy.text_encoders import llama, t5

        from .narrow_transformers import ENCODERS

        classes = {"qwen3_4b": llama.Qwen3_4B, "qwen25_7b": llama.Qwen25_7BVLI}
        config, operations = _t5_config(name) | ENCODERS[name], comfy.ops.disable_weight_init
        cls = classes.get(name, t5.T5)
        weights = random.like(checkpoints.shapes_of(lambda: cls(config, None, "meta", operations)))
        if name == "umt5xxl":
            weights["spiece_model"] = _letters()
        return weights

    return make


def _t5_config(name: str) -> dict[str, Any]:
    from comfy import text_encoders

    file = Path(next(iter(text_encoders.__path__))) / f"{name.removesuffix('xxl')}_config_xxl.json"
    return dict(json.loads(file.read_text("utf-8"))) if file.is_file() else {}


def _letters(*, unknown: int = 2, beginning: int = -1) -> torch.Tensor:
    """A tokenizer of single letters, as T5's files for Wan and Gemma's for LTX-2 hold theirs.

    Args:
        unknown, beginning: ids; it has no beginning at -1.
    """
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([string.printable[:95]]),  # with one space
        model_writer=written,
        model_type="char",
        pad_id=0,
        eos_id=1,
        unk_id=unknown,
        bos_id=beginning,
        minloglevel=2,
    )
    return torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)


def _clip_l(random: Random) -> Weights:
    from .narrow_transformers import ENCODERS

    sizes = ENCODERS["clip_l"]
    size = (sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"])
    return checkpoints.clip_text(size, random)


def _flux_vae(random: Random) -> Weights:
    return checkpoints.taesd(random, scale=0.3611, shift=0.1159, channels=16)


def _flux2_vae(random: Random) -> Weights:
    """Flux 2's decoder, an eighth as wide; no encoder, whose width the host does not read."""
    from comfy.ldm.models.autoencoder import AutoencoderKL

    full = {
        "double_z": True,
        "z_channels": 32,
        "resolution": 256,
        "in_channels": 3,
        "out_ch": 3,
        "ch": 128,
        "ch_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "attn_resolutions": [],
        "dropout": 0.0,
        "batch_norm_latent": True,
    }
    shapes = checkpoints.shapes_of(
        lambda: AutoencoderKL(ddconfig=full, decoder_ddconfig={**full, "ch": 32}, embed_dim=32)
    )
    parts = ("decoder.", "post_quant_conv.")
    weights = random.like({k: shape for k, shape in shapes.items() if k.startswith(parts)})
    channels = shapes["bn.running_mean"]
    return weights | {
        "bn.running_mean": torch.zeros(channels),
        "bn.running_var": torch.ones(channels),
    }


def _wan_vae(random: Random) -> Weights:
    """Wan's VAE, eight channels wide."""
    from comfy.ldm.wan.vae import WanVAE

    shape = {"dim": 8, "z_dim": 16, "temperal_downsample": [False, True, True]}
    weights = random.like(checkpoints.shapes_of(lambda: WanVAE(**shape)))
    for name, value in weights.items():
        if name.endswith("gamma"):
            weights[name] = torch.ones_like(value)
    return weights


def _ltx(random: Random) -> Weights:
    transformer = _quantised(small_audio_video.LTX, "fp8_e4m3fn")
    return small_audio_video.ltx_checkpoint(transformer(random), random)


def _gemma(random: Random) -> Weights:
    return small_audio_video.gemma(random) | {"spiece_model": _letters(unknown=3, beginning=2)}


def _in_metadata(**transformer: Any) -> dict[str, str]:
    return {"config": json.dumps({"transformer": transformer})}


def _wan(**changed: Any) -> Kind:
    make = _quantised("wan", "fp8_e4m3fn", **changed)
    return Kind("diffusion_models", make, _in_metadata(text_dim=64))


_FLUX = {"vec_in_dim": 64}
FILES = {
    "z_image_turbo_bf16.safetensors": Kind("diffusion_models", _transformer("zimage")),
    "z_image_turbo_int8_convrot.safetensors": Kind(
        "diffusion_models", _quantised("zimage", "int8_convrot")
    ),
    "flux1-dev.safetensors": Kind("diffusion_models", _transformer("flux1", **_FLUX)),
    "flux1-krea-dev_fp8_scaled.safetensors": Kind(
        "diffusion_models", _quantised("flux1", "fp8_e4m3fn", **_FLUX)
    ),
    "flux1-dev-int8-convrot.safetensors": Kind(
        "diffusion_models", _quantised("flux1", "int8_convrot", plain="_attn.proj.", **_FLUX)
    ),
    "flux-2-klein-4b.safetensors": Kind(
        "diffusion_models", _transformer("flux2", context_in_dim=3 * 64)
    ),
    "qwen_image_edit_2509_fp8_e4m3fn.safetensors": Kind("diffusion_models", _transformer("qwen")),
    "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors": _wan(),
    "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors": _wan(),
    "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors": _wan(in_dim=36),
    "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors": _wan(in_dim=36),
    "ltx-2.3-22b-dev-fp8.safetensors": Kind(
        "checkpoints", _ltx, small_audio_video.CHECKPOINT_METADATA
    ),
    "minimax_h3_fl2va_pruned_int8_convrot.safetensors": Kind(
        "diffusion_models", _quantised("h3_curves", "int8_convrot", text_dim=64)
    ),
    "Hyper-FLUX.1-dev-8steps-lora.safetensors": Kind("loras", _lora("flux1", **_FLUX)),
    "ltx_2.3_22b_distilled_1.1_lora_dynamic_fro09_avg_rank_111_bf16.safetensors": Kind(
        "loras", _lora(small_audio_video.LTX)
    ),
    "clip_l.safetensors": Kind("text_encoders", _clip_l),
    "t5xxl_fp16.safetensors": Kind("text_encoders", _encoder("t5xxl")),
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors": Kind("text_encoders", _encoder("umt5xxl")),
    "qwen_3_4b.safetensors": Kind("text_encoders", _encoder("qwen3_4b")),
    "qwen_2.5_vl_7b_fp8_scaled.safetensors": Kind("text_encoders", _encoder("qwen25_7b")),
    "gemma_3_12B_it_fp4_mixed.safetensors": Kind("text_encoders", _gemma),
    "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors": Kind("text_encoders", small_audio_video.qwen),
    "ltx-2.3-spatial-upscaler-x2-1.1.safetensors": Kind(
        "latent_upscale_models", small_audio_video.upsampler, small_audio_video.UPSAMPLER_METADATA
    ),
    "ae.safetensors": Kind("vae", _flux_vae),
    "flux2-vae.safetensors": Kind("vae", _flux2_vae),
    "qwen_image_vae.safetensors": Kind("vae", _wan_vae),
    "wan_2.1_vae.safetensors": Kind("vae", _wan_vae),
    "minimax_h3_video_vae_fp16.safetensors": Kind("vae", small_audio_video.h3_video_vae),
    "minimax_h3_audio_vae_fp32.safetensors": Kind("vae", small_audio_video.h3_audio_vae),
}
"""What each file is, by its name in the workflows."""
