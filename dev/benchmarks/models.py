"""Full-size model files with random weights, which the host's own loaders accept: UNets, VAEs,
ControlNets, ControlLoRAs, LoRAs.

Weights keep the variance of what passes through them (fan-in scaling, norms near one, residual
branches damped), so that a half-precision run neither overflows nor dies out, and nothing is zero,
so that every branch counts in a comparison. The shapes come from the host's own classes, built on
the meta device. The narrow kinds are those of `dev/tools/`, for a smoke run on a CPU; the host must
be told of them first (`register_narrow`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .pack import ROOT, import_alias

_COMMON: dict[str, Any] = {
    "image_size": 32,
    "use_checkpoint": False,
    "use_spatial_transformer": True,
    "legacy": False,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "use_temporal_attention": False,
    "use_temporal_resblock": False,
}
_SD15: dict[str, Any] = {
    **_COMMON,
    "num_res_blocks": [2, 2, 2, 2],
    "channel_mult": [1, 2, 4, 4],
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "transformer_depth_middle": 1,
    "context_dim": 768,
    "use_linear_in_transformer": False,
    "adm_in_channels": None,
    "num_heads": 8,
    "num_head_channels": -1,
}
_SDXL: dict[str, Any] = {
    **_COMMON,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 2, 4],
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "transformer_depth_middle": 10,
    "context_dim": 2048,
    "use_linear_in_transformer": True,
    "num_classes": "sequential",
    "adm_in_channels": 2816,
    "num_heads": -1,
    "num_head_channels": 64,
}


class Kind(NamedTuple):
    """One architecture: widths of its conditioning, and its UNet (None: one of `dev/tools/`)."""

    tokens_width: int
    pooled_width: int | None
    unet: dict[str, Any] | None = None


KINDS: dict[str, Kind] = {
    "sd15": Kind(768, None, _SD15),
    "sdxl": Kind(2048, 1280, _SDXL),
    "narrow15": Kind(64, None),
    "narrowxl": Kind(128, 64),
}
_VAE: dict[str, Any] = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 128,
    "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_resolutions": [],
    "dropout": 0.0,
}
#: VAEs by name: SD1.5 and SDXL have the same one; the narrow one has every kind of block.
VAES: dict[str, dict[str, Any]] = {
    "vae": _VAE,
    "narrowvae": {**_VAE, "ch": 64, "ch_mult": [1, 1, 1, 2], "num_res_blocks": 1},
}
# Last layers of a residual branch are damped, or a random net's activations grow with its depth.
# Not those of the cross-attention: random tokens average out, and the prompt must stay visible.
_RESIDUAL_ENDS = ("out_layers.3.weight", "proj_out.weight", "to_out.0.weight", "ff.net.2.weight")
_RESIDUAL_GAIN = 0.3
_ZERO_CONVS = ("zero_convs.", "middle_block_out.")  # zero in a ControlNet not trained yet
_ZERO_CONV_GAIN = 0.05
_NOT_IN_CONTROLNET = ("out_channels", "transformer_depth_output")
_LORA_RANK = 16
# With rank and alpha 16 a weight's norm changes by 50 % (linear) or 40 % (conv): the output moves
# far more than half precision does. Queries and keys change by 20 %: sharper attention would not
# test more, it would only amplify the rounding of whatever runs it.
_LORA_UP_STD = {False: 0.12, True: 0.1}
_LORA_UP_STD_LOGITS = 0.05


def unet_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a kind's parameters, from the host's own class; needs a booted host."""
    import torch
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    options = {"dtype": torch.float16, "device": "meta", "operations": operations()}
    return _shapes(UNetModel(**unet_config(kind), **options))


def controlnet_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of a ControlNet for a kind's UNet."""
    import torch
    from comfy.cldm.cldm import ControlNet

    config = unet_config(kind)
    config = {k: v for k, v in config.items() if k not in _NOT_IN_CONTROLNET}
    options = {"dtype": torch.float16, "device": "meta", "operations": operations()}
    return _shapes(ControlNet(**config, hint_channels=3, **options))


def vae_config(kind: str) -> dict[str, Any]:
    """What the host's `AutoencoderKL` takes to make this VAE."""
    return {"embed_dim": 4, "ddconfig": VAES[kind]}


def vae_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a VAE's parameters, in the layout that the host detects by its keys."""
    import torch
    from comfy.ldm.models.autoencoder import AutoencoderKL

    with torch.device("meta"):
        return _shapes(AutoencoderKL(**vae_config(kind)))


def write_unet(path: Path, kind: str, *, dtype: str, seed: int, device: str) -> int:
    """Write a UNet-only safetensors file; the random numbers are drawn on `device`, in float32.

    Returns the file's size in bytes. The same seed on another device or torch version gives other
    weights.
    """
    return _write(path, _network(unet_shapes(kind), _Drawer.seeded(seed, device, dtype)))


def write_controlnet(path: Path, kind: str, *, seed: int, device: str) -> int:
    """Write a ControlNet for a kind's UNet, in float16; its zero convolutions are small, not zero.

    What it adds is then about a twentieth of what it is added to.
    """
    draw = _Drawer.seeded(seed, device, "float16")
    return _write(path, _control_network(controlnet_shapes(kind), draw))


def write_controllora(path: Path, kind: str, *, seed: int, device: str) -> int:
    """Write a ControlLoRA, in float16: up and down for each matrix that the UNet has too.

    Biases, norms, the hint's block and the zero convolutions are whole.
    """
    import torch

    draw = _Drawer.seeded(seed, device, "float16")
    unet = unet_shapes(kind)
    shapes = controlnet_shapes(kind)
    shared = {name: shape for name, shape in shapes.items() if name in unet and len(shape) >= 2}
    own = {name: shape for name, shape in shapes.items() if name not in shared}
    tensors = {"lora_controlnet": torch.zeros(0), **_control_network(own, draw)}
    for name, shape in shared.items():
        stem = name.removesuffix(".weight")
        up, down = (shape[0], _LORA_RANK, *(1,) * (len(shape) - 2)), (_LORA_RANK, *shape[1:])
        tensors[f"{stem}.up"] = draw(up, _LORA_UP_STD_LOGITS)
        tensors[f"{stem}.down"] = draw(down, 1.0 / math.sqrt(math.prod(shape[1:])))
    return _write(path, tensors)


def write_network(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    *,
    dtype: str,
    seed: int,
    device: str,
    form: str | None = None,
    exact: Collection[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write a file of a network with these parameters, its blocks in a format of
    `dev/tools/quantised.py` if one is named.

    Args:
        exact: names of those that such files have in float32.
        metadata: what such a file says of itself.
    """
    import torch

    tensors = _network(shapes, _Drawer.seeded(seed, device, dtype))
    tensors |= {name: tensors[name].to(torch.float32) for name in exact}
    if form is not None:
        import_alias("warmgraph_tools", ROOT / "dev" / "tools")
        from warmgraph_tools.quantised import quantised

        tensors = quantised(tensors, form, device=device)
    return _write(path, tensors, metadata)


def random_network(
    shapes: dict[str, tuple[int, ...]], *, dtype: str, seed: int, device: str
) -> dict[str, Any]:
    """Weights of a network with these parameters, on the CPU."""
    return _network(shapes, _Drawer.seeded(seed, device, dtype))


def write_vae(path: Path, kind: str, *, dtype: str, seed: int, device: str) -> int:
    """Write a VAE whose pixels mostly stay within what the host does not cut off."""
    return _write(path, _network(vae_shapes(kind), _Drawer.seeded(seed, device, dtype)))


def write_lora(path: Path, kind: str, *, conv: bool, seed: int, device: str) -> int:
    """Write a LoRA in kohya's names: all transformer layers, 3x3 convolutions too if `conv`."""
    import torch

    draw = _Drawer.seeded(seed, device, "float16")
    tensors = {}
    for name, shape in unet_shapes(kind).items():
        if not name.endswith(".weight") or len(shape) < 2:
            continue
        attention = ".transformer_blocks." in name
        attention = attention or name.endswith((".proj_in.weight", ".proj_out.weight"))
        if not (attention or (conv and len(shape) == 4 and shape[2] == 3)):
            continue
        stem = "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
        down = (_LORA_RANK, *shape[1:])
        up = (shape[0], _LORA_RANK, *(1,) * (len(shape) - 2))
        tensors[f"{stem}.lora_down.weight"] = draw(down, 1.0 / math.sqrt(math.prod(shape[1:])))
        logits = name.endswith((".to_q.weight", ".to_k.weight"))
        up_std = _LORA_UP_STD_LOGITS if logits else _LORA_UP_STD[conv]
        tensors[f"{stem}.lora_up.weight"] = draw(up, up_std)
        tensors[f"{stem}.alpha"] = torch.tensor(float(_LORA_RANK))
    return _write(path, tensors)


def register_narrow() -> None:
    """Tell this process's host of the narrow kinds, so that its own loader detects them."""
    import_alias("warmgraph_tools", ROOT / "dev" / "tools")
    import warmgraph_tools.narrow_arch  # noqa: F401


def unet_config(kind: str) -> dict[str, Any]:
    config = KINDS[kind].unet
    if config is not None:
        return config
    import_alias("warmgraph_tools", ROOT / "dev" / "tools")
    from warmgraph_tools.checkpoints import UNETS

    return UNETS[kind]


def operations() -> Any:
    """The host's layers without weights of their own."""
    import comfy.ops
    import torch

    class Operations(comfy.ops.disable_weight_init):
        Linear = torch.nn.Linear  # under dynamic VRAM the host's own makes no weight by itself

    return Operations


def _shapes(module: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def _network(shapes: dict[str, tuple[int, ...]], draw: _Drawer) -> dict[str, Any]:
    """A network's weights: fan-in scaling, norms near one, residual branches damped."""
    import torch

    tensors = {}
    for name, shape in shapes.items():
        if name.endswith("inv_freq"):  # of rotations
            tensors[name] = 1e-4 ** (torch.arange(*shape) / shape[0])
        elif len(shape) >= 2:
            std = 1.0 / math.sqrt(math.prod(shape[1:]))
            if name.endswith(_RESIDUAL_ENDS) and not name.endswith("attn2.to_out.0.weight"):
                std *= _RESIDUAL_GAIN
            tensors[name] = draw(shape, std)
        elif name.endswith("weight"):
            tensors[name] = draw(shape, 0.05, mean=1.0)
        else:
            tensors[name] = draw(shape, 0.02)
    return tensors


def _control_network(shapes: dict[str, tuple[int, ...]], draw: _Drawer) -> dict[str, Any]:
    tensors = _network(shapes, draw)
    for name in tensors:
        if name.startswith(_ZERO_CONVS):
            tensors[name] *= _ZERO_CONV_GAIN
    return tensors


class _Drawer:
    """Normal random tensors, drawn on the device and handed over on the CPU in the file's dtype."""

    def __init__(self, generator: Any, device: str, dtype: Any) -> None:
        self._generator, self._device, self._dtype = generator, device, dtype

    @classmethod
    def seeded(cls, seed: int, device: str, dtype: str) -> _Drawer:
        import torch

        generator = torch.Generator(device=device).manual_seed(seed)
        return cls(generator, device, getattr(torch, dtype))

    def __call__(self, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Any:
        import torch

        value = torch.empty(shape, device=self._device, dtype=torch.float32)
        return value.normal_(mean, std, generator=self._generator).to(self._dtype).cpu()


def _write(path: Path, tensors: dict[str, Any], metadata: Mapping[str, str] | None = None) -> int:
    """Write under another name and rename: a killed run leaves no half file to be reused."""
    import safetensors.torch

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    safetensors.torch.save_file(tensors, str(part), metadata={"format": "pt", **(metadata or {})})
    os.replace(part, path)
    return path.stat().st_size
