"""Small diffusion transformers of the host's own classes, with random weights and conditioning."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

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
_ZIMAGE = {
    "image_model": "lumina2",
    "patch_size": 2,
    "in_channels": 16,
    "dim": 256,
    "cap_feat_dim": 64,
    "n_layers": 2,
    "qk_norm": True,
    "n_heads": 2,
    "n_kv_heads": 2,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}


class Small(NamedTuple):
    """A small model: its settings, the host's name for it, its latent's channels, a text's width,
    and how many kinds of regions and places it has.
    """

    settings: dict[str, Any]
    name: str
    channels: int
    text: int
    kinds: int
    places: int


KINDS = {
    "flux1": Small(_FLUX, "Flux", 16, 64, 3, 5),
    "flux2": Small(_FLUX2, "Flux2", 128, 64, 3, 5),
    "zimage": Small(_ZIMAGE, "ZImage", 16, 64, 3, 7),
}


def load(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return a MODEL as the host's loader makes it of a file with these widths, which its detection
    knows at their full size alone.
    """
    from comfy import model_management, model_patcher, supported_models

    small = KINDS[kind]
    config = getattr(supported_models, small.name)(dict(small.settings))
    config.set_inference_dtype(dtype, None)
    device = model_management.get_torch_device()
    model = config.get_model({}, "", device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.diffusion_model.named_parameters():
            weight.copy_(_values(name, weight, generator))
    patcher = getattr(model_patcher, "CoreModelPatcher", model_patcher.ModelPatcher)
    return patcher(model, load_device=device, offload_device=torch.device("cpu"))


def conditioning(kind: str, tokens: int, *, seed: int = 1, batch: int = 1) -> Any:
    """A CONDITIONING of so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    small = KINDS[kind]
    text = torch.randn(batch, tokens, small.text, generator=generator)
    pooled = torch.randn(batch, 32, generator=generator)
    return [[text, {"pooled_output": pooled, "guidance": 3.5}]]


def latent(kind: str, height: int, width: int, *, batch: int = 1) -> dict[str, torch.Tensor]:
    """An empty LATENT."""
    return {"samples": torch.zeros(batch, KINDS[kind].channels, height, width)}


def _values(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(weight.shape, generator=generator)
    if weight.dim() == 1:
        scale = "norm" in name and name.endswith(("weight", "scale"))
        return (1.0 if scale else 0.0) + 0.05 * values
    return values / weight.shape[1:].numel() ** 0.5
