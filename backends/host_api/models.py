"""Facts of a loaded MODEL, and one evaluation of it on empty inputs.

Relies on the host's `comfy/model_patcher.py` (`ModelPatcher`), `comfy/model_base.py` (`BaseModel`)
and, for names, the classes of `comfy/supported_models.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_CLASS = "diffusion_model.__class__"
#: What people call a model, by the class by which the host's detection knows its file. Wan 2.2's
#: 14B models have Wan 2.1's classes.
_NAMES = {
    "SD15": "SD1.5",
    "SD15_instructpix2pix": "SD1.5 InstructPix2Pix",
    "SD20": "SD2",
    "SDXL": "SDXL",
    "SDXLRefiner": "SDXL refiner",
    "SDXL_instructpix2pix": "SDXL InstructPix2Pix",
    "SSD1B": "SSD-1B",
    "Segmind_Vega": "Segmind Vega",
    "SVD_img2vid": "Stable Video Diffusion",
    "SD3": "SD3",
    "AuraFlow": "AuraFlow",
    "Flux": "Flux 1 dev",
    "FluxInpaint": "Flux 1 Fill",
    "FluxSchnell": "Flux 1 schnell",
    "Flux2": "Flux 2",
    "Chroma": "Chroma",
    "Lumina2": "Lumina 2",
    "ZImage": "Z-Image",
    "QwenImage": "Qwen-Image",
    "Krea2": "Krea 2",
    "WAN21_T2V": "Wan text to video",
    "WAN21_I2V": "Wan image to video",
    "WAN21_Vace": "Wan Vace",
    "WAN21_Camera": "Wan 2.1 Camera",
    "WAN22_Camera": "Wan 2.2 Camera",
    "WAN21_FunControl2V": "Wan Fun Control",
    "WAN22_T2V": "Wan 2.2 5B",
    "WAN22_S2V": "Wan 2.2 S2V",
    "WAN22_Animate": "Wan 2.2 Animate",
    "WAN21_SCAIL": "Wan SCAIL",
    "HunyuanVideo": "HunyuanVideo",
    "HunyuanVideo15": "HunyuanVideo 1.5",
    "HunyuanImage21": "HunyuanImage 2.1",
    "CosmosT2V": "Cosmos",
    "CosmosI2V": "Cosmos",
    "CosmosT2IPredict2": "Cosmos Predict2",
    "CosmosI2VPredict2": "Cosmos Predict2",
    "Anima": "Anima",
    "Omnigen2": "OmniGen2",
    "ErnieImage": "Ernie-Image",
    "Kandinsky5": "Kandinsky 5",
    "Kandinsky5Image": "Kandinsky 5",
}


class LatentScale(NamedTuple):
    """Pixels, and frames of a video, per element of a latent."""

    space: int = 8
    time: int = 1

    def size(self, latent: Sequence[int]) -> str:
        """Name a latent's size: `1024x1024`, `832x480, 81 frames`.

        Args:
            latent: [B, C, H, W] or [B, C, T, H, W]; other shapes as plain numbers.
        """
        if len(latent) not in (4, 5):
            return " x ".join(map(str, latent[1:]))
        height, width = (side * self.space for side in latent[-2:])
        frames = 1 if len(latent) == 4 else (latent[2] - 1) * self.time + 1
        return f"{width}x{height}" if frames == 1 else f"{width}x{height}, {frames} frames"


def is_model(thing: Any) -> bool:
    """Tell whether a thing is a MODEL, of the host's class or a subclass."""
    cls = getattr(sys.modules.get("comfy.model_patcher"), "ModelPatcher", None)
    return cls is not None and isinstance(thing, cls)


def loaded_model(patcher: Any) -> Any:
    """Return the host's model with weights that a MODEL or a VAE's patcher loads."""
    return patcher.model


def diffusion_model(patcher: Any) -> torch.nn.Module:
    root: torch.nn.Module = patcher.model.diffusion_model
    return root


def model_name(patcher: Any) -> str:
    """Return a MODEL's display name by its file's class or a base; else the host's class name."""
    classes = type(getattr(patcher.model, "model_config", None)).__mro__
    names = (_NAMES.get(cls.__name__) for cls in classes)
    return next(filter(None, names), type(patcher.model).__name__)


def called_module(model: Any) -> Any:
    """Return the module that a model's next call goes to, perhaps another node's."""
    return model.diffusion_model


def running_on(model: Any) -> Any:
    """Return the MODEL that now runs on a patcher's model, or None."""
    return getattr(model, "current_patcher", None)


def calls_replaced(patcher: Any) -> Iterator[Any]:
    """Yield others' replacements of the host's code that calls a MODEL."""
    own = vars(loaded_model(patcher))
    yield from (own[name] for name in ("apply_model", "_apply_model") if name in own)
    if (wrapper := patcher.model_options.get("model_function_wrapper")) is not None:
        yield wrapper


def compute_dtype(patcher: Any) -> torch.dtype:
    manual: torch.dtype | None = patcher.get_model_object("manual_cast_dtype")
    stored: torch.dtype = patcher.model.get_dtype()
    return manual if manual is not None else stored


def load_device(patcher: Any) -> torch.device:
    device: torch.device = patcher.load_device
    return device


def patched_objects(patcher: Any) -> Mapping[str, Any]:
    """Return what other nodes put in place of a model's parts, by name."""
    patches: Mapping[str, Any] = patcher.object_patches
    return patches


def patched_parts(patcher: Any) -> Mapping[str, Any]:
    """Return the same for the MODEL that now runs, of its diffusion model alone."""
    current = getattr(patcher.model, "current_patcher", None)
    patches: Mapping[str, Any] = getattr(current, "object_patches", {})
    return {n: patch for n, patch in patches.items() if n.startswith("diffusion_model")}


def own_class(patcher: Any) -> type:
    """Return a diffusion model's class while no clone is loaded, whose patches may swap it."""
    own: type = patcher.object_patches_backup.get(_CLASS, type(diffusion_model(patcher)))
    return own


def settings(patcher: Any) -> Mapping[str, Any]:
    """Return a diffusion model's settings, as the host detected them from its file."""
    found: Mapping[str, Any] = patcher.model.model_config.unet_config
    return found


def latent_shape(patcher: Any, rows: int, width: int, height: int) -> tuple[int, ...]:
    """Return the shape of an image's latent.

    Args:
        rows: of the batch as the model sees it.
        width, height: in pixels.
    """
    form, scale = patcher.model.latent_format, latent_scale(patcher).space
    frames = (1,) * (getattr(form, "latent_dimensions", 2) - 2)
    return (rows, form.latent_channels, *frames, height // scale, width // scale)


def latent_scale(patcher: Any) -> LatentScale:
    form, plain = getattr(patcher.model, "latent_format", None), LatentScale()
    return LatentScale(
        getattr(form, "spacial_downscale_ratio", plain.space),
        getattr(form, "temporal_downscale_ratio", plain.time),
    )


def run_forward(patcher: Any, latent: tuple[int, ...], inputs: Mapping[str, Any]) -> None:
    """Run one model evaluation on an empty latent, with the patcher's own wrappers.

    Args:
        latent: its shape; the first side is the batch as the model sees it.
        inputs: other inputs: shapes of empty tensors, plain values, and `latent_shapes` if a model
            makes several latents.
    """
    import comfy.model_management as management
    from comfy.patcher_extension import merge_nested_dicts

    management.load_models_gpu([patcher])
    model, device = patcher.model, patcher.load_device
    options = dict(patcher.model_options.get("transformer_options", {}))
    options["wrappers"] = merge_nested_dicts(options.get("wrappers", {}), patcher.wrappers)
    given = {
        name: torch.zeros(value, device=device) if isinstance(value, tuple) else value
        for name, value in inputs.items()
    }
    if (shapes := inputs.get("latent_shapes")) is not None:  # which the host hands over as a row
        latent = (latent[0], 1, sum(math.prod(shape[1:]) for shape in shapes))
    patcher.pre_run()
    try:
        with torch.inference_mode():
            model.apply_model(
                torch.zeros(latent, device=device),
                torch.ones(latent[0], device=device),
                transformer_options=options,
                **given,
            )
    finally:
        patcher.cleanup()
