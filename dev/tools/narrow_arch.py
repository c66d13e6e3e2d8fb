"""Test-only one-file pack: narrow architectures, so that the host's own loader takes small files.

Detection, weight loading, ModelPatcher, text encoder and VAE code stay the host's; only its list
of model classes grows. Copied into `custom_nodes/` of a test server, or imported after
the host's modules in this process.
"""

from __future__ import annotations

from typing import Any, ClassVar

from comfy import sd1_clip, sdxl_clip, supported_models, supported_models_base

NODE_CLASS_MAPPINGS: dict[str, type] = {}

WIDTH = 64
_ENCODER = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 1}
ENCODER_15 = {**_ENCODER, "num_hidden_layers": 1}
ENCODER_XL = {**_ENCODER, "num_hidden_layers": 3}  # SDXL reads the last layer but one


def _narrow(cls: type, options: dict[str, Any]) -> type:
    """Return a text encoder class whose JSON configuration is overridden by `options`."""

    class NarrowTextEncoder(cls):  # type: ignore[misc, valid-type]
        def __init__(self, model_options: dict[str, Any] | None = None, **rest: Any) -> None:
            super().__init__(model_options={**options, **(model_options or {})}, **rest)

    return NarrowTextEncoder


def _clip_15() -> Any:
    encoder = _narrow(sd1_clip.SD1ClipModel, {"clip_l_model_config": ENCODER_15})
    return supported_models_base.ClipTarget(sd1_clip.SD1Tokenizer, encoder)


def _clip_xl() -> Any:
    options = {
        "clip_l_model_config": ENCODER_XL,
        "clip_g_model_config": {**ENCODER_XL, "projection_dim": WIDTH},
    }
    encoder = _narrow(sdxl_clip.SDXLClipModel, options)
    return supported_models_base.ClipTarget(sdxl_clip.SDXLTokenizer, encoder)


class NarrowSD15(supported_models.SD15):
    """SD1.5 (and its inpaint form) of width 64."""

    unet_config: ClassVar[dict[str, Any]] = {
        **supported_models.SD15.unet_config,
        "model_channels": WIDTH,
        "context_dim": WIDTH,
    }

    def clip_target(self, state_dict: Any = None) -> Any:
        """Return the narrow CLIP-L."""
        return _clip_15()


class NarrowSD20(supported_models.SD20):
    """SD2 of width 64: linear projections, heads of 64."""

    unet_config: ClassVar[dict[str, Any]] = {
        **supported_models.SD20.unet_config,
        "model_channels": WIDTH,
        "context_dim": WIDTH,
    }

    def process_clip_state_dict(self, state_dict: Any) -> Any:
        """Read the text encoder as an SD1.5 file's."""
        return supported_models.SD15.process_clip_state_dict(self, state_dict)  # type: ignore[arg-type]

    def clip_target(self, state_dict: Any = None) -> Any:
        """Return the narrow CLIP-L: SD2's own OpenCLIP adds nothing that the UNet's tests need."""
        return _clip_15()


class NarrowSDXL(supported_models.SDXL):
    """SDXL of width 64: text 64 + 64, label embedding of pooled 64 + 6 x 256."""

    unet_config: ClassVar[dict[str, Any]] = {
        key: value
        for key, value in supported_models.SDXL.unet_config.items()
        if key != "transformer_depth"
    } | {"model_channels": WIDTH, "context_dim": 2 * WIDTH, "adm_in_channels": WIDTH + 6 * 256}

    def clip_target(self, state_dict: Any = None) -> Any:
        """Return the narrow pair CLIP-L and CLIP-G."""
        return _clip_xl()


for _cls in (NarrowSD15, NarrowSD20, NarrowSDXL):
    if _cls.__name__ not in [known.__name__ for known in supported_models.models]:
        supported_models.models.append(_cls)
