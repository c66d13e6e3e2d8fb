"""Small diffusion transformers of the host's own classes, with random weights and conditioning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .quantised import quantised
from .small_kinds import KINDS, Small


def is_there(kind: str) -> bool:
    """Tell whether this host has such a model."""
    from comfy import supported_models

    return hasattr(supported_models, KINDS[kind].name)


def load(
    kind: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
) -> Any:
    """Return a MODEL as the host's loader makes it of a file with these widths, which its detection
    knows at their full size alone.

    Args:
        stored: the weights' dtype, where that is not the one that the model computes in.
    """
    return load_file(kind, weights(kind, seed=seed, dtype=dtype), dtype=dtype, stored=stored)


def load_file(
    kind: str,
    file: dict[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    stored: torch.dtype | None = None,
) -> Any:
    """As `load`, of these weights."""
    return _patcher(make(kind, dtype=dtype, stored=stored), file)


def make(
    kind: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    stored: torch.dtype | None = None,
) -> Any:
    """Return the host's model within a MODEL, whose weights are not set."""
    return make_small(KINDS[kind], dtype=dtype, device=device, stored=stored)


def is_here(kind: str) -> bool:
    """Tell whether this host knows such a model."""
    from comfy import supported_models

    return hasattr(supported_models, KINDS[kind].name)


def make_small(
    small: Small,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    stored: torch.dtype | None = None,
) -> Any:
    """As `make`, of a model that has no name here."""
    config = _config(small)
    config.set_inference_dtype(stored or dtype, dtype if stored else None)
    return config.get_model(_beside(small), "", device=torch.device(device))


def _beside(small: Small) -> dict[str, torch.Tensor]:
    """What a model is not made without: Stable Audio's of times."""
    if small.name != "StableAudio":
        return {}
    from comfy.ldm.audio.embedders import NumberConditioner

    made = {"seconds_start": NumberConditioner(768), "seconds_total": NumberConditioner(768)}
    for module in made.values():
        fill(module)
    return {
        f"conditioner.conditioners.{name}.{key}": value
        for name, module in made.items()
        for key, value in module.state_dict().items()
    }


#: Of which the host's detection knows a file at these widths.
DETECTED = ("flux1", "wan")
#: Plain weights as "fp8_e4m3fn_fast" of the loader has them: fp8, multiplied as they are.
FAST = "fp8_fast"


def load_quantised(
    kind: str,
    form: str | Callable[[str], str],
    *,
    seed: int = 0,
    change: Callable[[dict[str, torch.Tensor]], Any] = lambda file: None,
) -> Any:
    """Return a MODEL as the host's loader makes it of a file whose blocks are quantised.

    Args:
        form: of `quantised.FORMATS`, or what says which a weight has; or `FAST`, of a kind of
            `DETECTED`.
        change: what is done to the file.
    """
    import comfy.sd
    from comfy import model_management, utils

    if form == FAST:
        options = {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True}
        return comfy.sd.load_diffusion_model_state_dict(
            weights(kind, seed=seed), model_options=options
        )
    file = quantised(weights(kind, seed=seed), form)
    change(file)
    if kind in DETECTED:
        return comfy.sd.load_diffusion_model_state_dict(file)
    config = _config(KINDS[kind])
    config.quant_config = utils.detect_layer_quantization(file, "")
    device = model_management.get_torch_device()
    dtypes = config.supported_inference_dtypes
    dtype = model_management.unet_dtype(supported_dtypes=list(dtypes))
    config.set_inference_dtype(dtype, model_management.unet_manual_cast(None, device, dtypes))
    model = config.get_model({}, "", device=torch.device("cpu"))
    return _patcher(model, file)


def _config(small: Small, **changed: Any) -> Any:
    """What the host knows of a model with these settings, as its detection would give it."""
    from comfy import supported_models

    return getattr(supported_models, small.name)({**small.settings, **changed})


def _patcher(model: Any, file: dict[str, torch.Tensor]) -> Any:
    """The MODEL of a host's model, with the weights of a file."""
    from comfy import model_management, model_patcher

    device = model_management.get_torch_device()
    cls = getattr(model_patcher, "CoreModelPatcher", model_patcher.ModelPatcher)
    patcher = cls(model, load_device=device, offload_device=torch.device("cpu"))
    model.load_model_weights(file, "", assign=patcher.is_dynamic())
    return patcher


def weights(
    kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changed: Any
) -> dict[str, torch.Tensor]:
    """Random weights that keep what a model computes near one, by the names in its file.

    Args:
        changed: Settings that are to differ from the kind's.
    """
    import comfy.ops

    class Operations(comfy.ops.disable_weight_init):
        Linear = torch.nn.Linear  # under dynamic VRAM the host's own makes no weight by itself

    config = _config(KINDS[kind], **changed)
    config.set_inference_dtype(dtype, None)
    config.custom_operations = Operations
    root = config.get_model(_beside(KINDS[kind]), "", device=torch.device("cpu")).diffusion_model
    fill(root, seed=seed)
    return {name: weight.detach() for name, weight in _learned(root).items()}


def fill(module: torch.nn.Module, *, seed: int = 0) -> None:
    """Give a module such weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in _learned(module).items():
            weight.copy_(_values(name, weight, generator))


#: Variants of Wan that look at what a CLIP sees.
_SEEING = ("i2v", "animate", "animate2", "scail", "scail2", "wandancer")
#: What is not called without a mask of its text.
_MASKED = ("Omnigen2", "Boogu", "LTXV", "HunyuanDiT")
#: Tokens that a CLIP takes at once.
_CHUNK = 77


def conditioning(kind: str, tokens: int, *, seed: int = 1, batch: int = 1, **facts: Any) -> Any:
    """A CONDITIONING of so many tokens, with these facts besides."""
    generator = torch.Generator().manual_seed(seed)
    small = KINDS[kind]
    text = torch.randn(batch, tokens, small.text, generator=generator)
    facts = {
        "pooled_output": torch.randn(batch, 32, generator=generator),
        "guidance": 3.5,
        **facts,
    }
    if small.name == "HunyuanDiT":  # of whole chunks of a CLIP, beside one of a T5
        tokens = -(-tokens // _CHUNK) * _CHUNK
        text = torch.randn(batch, tokens, small.text, generator=generator)
        facts["conditioning_mt5xl"] = torch.randn(batch, 256, small.text, generator=generator)
        facts["attention_mask_mt5xl"] = torch.ones(batch, 256, dtype=torch.long)
    if small.name == "ACEStep15":
        lyrics = torch.randn(batch, tokens + 7, small.text, generator=generator)
        facts["conditioning_lyrics"] = lyrics
    if small.name in _MASKED:
        facts.setdefault("attention_mask", torch.ones(batch, tokens, dtype=torch.long))
    if small.settings.get("model_type") in _SEEING:
        from comfy.clip_vision import Output

        facts["clip_vision_output"] = seen = Output()
        seen.penultimate_hidden_states = torch.randn(batch, 257, 1280, generator=generator)
    return [[text, facts]]


def extras(kind: str, height: int, width: int, frames: int, *, seed: int = 5) -> dict[str, Any]:
    """What the host's nodes put into a CONDITIONING for a variant of Wan, besides a text."""
    generator = torch.Generator().manual_seed(seed)

    def video(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, generator=generator)

    size, half = (height, width), (height // 2, width // 2)
    given: dict[str, Any]
    if kind == "wan_animate":
        given = {
            "face_video_pixels": video(3, 1, 512, 512).tanh(),
            "pose_video_latent": video(16, frames, *size),
            "concat_latent_image": video(16, frames, *size),
            "concat_mask": torch.ones(1, 4, frames, *size),
        }
    elif kind == "wan_s2v":
        given = {
            "audio_embed": video(25, 64, 4 * frames),
            "reference_latents": [video(16, 1, *size)],
            "control_video": video(16, frames, *size),
        }
    elif kind == "wan_humo":
        given = {
            "audio_embed": video(frames, 8, 5, 1280),
            "reference_latents": [video(16, 1, *size)],
        }
    elif kind == "wan_dancer":
        given = {"audio_embed": video(9, 35), "concat_latent_image": video(16, frames, *size)}
    elif kind == "wan_animate2":
        given = {"pose_video_latent": video(16, frames - 1, *size)}
    elif kind == "wan_vace":
        given = {
            "vace_frames": [video(32, frames, *size)],
            "vace_mask": [torch.ones(1, 64, frames, *size)],
            "vace_strength": [0.7],
        }
    elif kind in ("wan_scail", "wan_scail2"):
        given = {
            "reference_latents": [video(16, 1, *size)],
            "pose_video_latent": video(16, frames, *half),
        }
        if kind == "wan_scail2":
            given["driving_mask_28ch"] = (video(frames, 28, *half) > 0).float()
            given["ref_mask_28ch"] = (video(1 + frames, 28, *size) > 0).float()
    else:
        given = {}
    return given


#: Of places in no order, or of sound.
_ROWS = ("Hunyuan3Dv2", "StableAudio", "ACEStep15")


def latent(
    kind: str, height: int, width: int, *, batch: int = 1, frames: int = 1, sounds: int = 8
) -> Any:
    """An empty LATENT; of less than a patch of the model's at its edges nothing is made.

    Args:
        sounds: length of the audio's latent, where a model has one.
    """
    small = KINDS[kind]
    middle = (frames,) if small.is_video else ()
    height, width = (side // small.patch * small.patch for side in (height, width))
    images = torch.zeros(batch, small.channels, *middle, height, width)
    if small.name in _ROWS:
        return {"samples": images.flatten(2)}
    if small.sounds is None and small.name != "TripoSplat":
        return {"samples": images}
    from comfy.nested_tensor import NestedTensor

    if small.sounds is None:  # of as many places at any size, and a camera
        places = torch.zeros(batch, small.settings["q_token_length"], small.channels)
        return {"samples": NestedTensor((places, torch.zeros(batch, 1, 5)))}

    before, after = small.sounds
    return {"samples": NestedTensor((images, torch.zeros(batch, *before, sounds, *after)))}


def reference(kind: str, height: int, width: int, *, seed: int = 3) -> torch.Tensor:
    """The latent of an image that a model is to look at."""
    shape = latent(kind, height, width)["samples"].shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


#: Buffers that a file brings: SD3's positions, H3's and Stable Audio's rotations, H3's curve.
_ROTATIONS = ("rope.inv_freq", "transformer.rotary_pos_emb.inv_freq")
_IN_FILES = ("pos_embed", *_ROTATIONS, "adaln_t_table")


def _learned(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a file brings."""
    buffers = {name: each for name, each in module.named_buffers() if name in _IN_FILES}
    return {**dict(module.named_parameters()), **buffers}


def _values(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(weight.shape, generator=generator)
    if name in _ROTATIONS:
        return 1e-4 ** (torch.arange(len(weight)) / len(weight))
    if "scale_shift_table" in name:
        return 0.3 * values
    if weight.dim() == 1:
        scale = "norm" in name and name.endswith(("weight", "scale", "gamma"))
        return (1.0 if scale else 0.0) + 0.05 * values
    return values / weight.shape[1:].numel() ** 0.5
