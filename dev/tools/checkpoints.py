"""Write small model files with random weights that the host's own loaders accept.

Nothing is downloaded; the names and shapes of weights come from the host's classes. As a script:
`python -m dev.tools.checkpoints --host TREE --models DIRECTORY KIND...`. The narrow kinds need
`narrow_arch.py` registered in the host that loads them; `sd15` needs nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from .layouts import FLUX, FOLDERS, UNETS

Weights = dict[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]

_VOCABULARY, _POSITIONS = 49408, 77
_CLIP_L = (768, 3072, 12)  # width, inner width, layers
_DAMPED = (  # outputs of residual branches
    "out_layers.3.weight",
    "proj_out.weight",
    "to_out.0.weight",
    "ff.net.2.weight",
    "out_proj.weight",
    "fc2.weight",
    "conv.4.weight",
    "linear2.weight",
)


class Random:
    """Reproducible random fp16 tensors, dense or as overlapping views of one small buffer."""

    def __init__(self, seed: int, *, shared: bool) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self._shared = shared
        self._buffers: dict[float, torch.Tensor] = {}

    def normal(self, shape: tuple[int, ...], deviation: float) -> torch.Tensor:
        """Return N(0, deviation) of `shape`; big tensors share storage in shared mode."""
        if not self._shared or math.prod(shape) < 1 << 16:
            return (torch.randn(shape, generator=self.generator) * deviation).half()
        inner = math.prod(shape[1:])
        step = 131 if shape[0] < 8192 else 3  # rows overlap, and still differ
        needed = (shape[0] - 1) * step + inner + 4096
        buffer = self._buffers.get(deviation)
        if buffer is None or buffer.numel() < needed:
            size = max(needed, 1 << 18)
            buffer = (torch.randn(size, generator=self.generator) * deviation).half()
            self._buffers[deviation] = buffer
        spare = buffer.numel() - needed + 4096
        offset = int(torch.randint(0, spare, (1,), generator=self.generator))
        strides = [math.prod(shape[n + 1 :]) for n in range(1, len(shape))]
        return buffer.as_strided(shape, [step, *strides], offset)

    def like(self, shapes: Shapes, *, gain: float = 1.0, damping: float = 0.3) -> Weights:
        """Return weights that keep activations of order one; a zero branch would blind tests."""
        return {
            name: self._one(name, shape, gain, damping) for name, shape in sorted(shapes.items())
        }

    def _one(self, name: str, shape: tuple[int, ...], gain: float, damping: float) -> torch.Tensor:
        if not shape:
            return torch.zeros(shape, dtype=torch.float16)
        if len(shape) == 1:
            is_scale = name.endswith(("weight", "scale"))
            return (float(is_scale) + self.normal(shape, 0.05 if is_scale else 0.02).float()).half()
        deviation = gain / math.sqrt(math.prod(shape[1:]))
        if "embedding.weight" in name:
            deviation = 0.5
        elif name.endswith("attn2.to_out.0.weight"):
            deviation *= 1.5  # the mean of 77 random tokens is small: keep the prompt visible
        elif name.endswith(("attn2.to_q.weight", "attn2.to_k.weight")):
            deviation *= 2.0
        elif name.endswith(_DAMPED):
            deviation *= damping
        return self.normal(shape, deviation)


def shapes_of(build: Callable[[], torch.nn.Module]) -> dict[str, tuple[int, ...]]:
    """Return the state dict's shapes of a module that `build` makes on the meta device."""
    with torch.device("meta"):
        module = build()
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def _unet_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    operations = comfy.ops.disable_weight_init
    return shapes_of(lambda: UNetModel(**UNETS[kind], device="meta", operations=operations))


def _steady(weights: Weights, *, channels: int) -> Weights:
    """Make a random UNet predict its normalised input plus a little noise; sampling stays in range.

    The first convolution copies the latent into pairs (+x, -x), the last skip connection passes
    them on, and the output reads x back from them, because silu(a) - silu(-a) = a.
    """
    width = weights["input_blocks.0.0.weight"].shape[0]
    pair = torch.arange(width)
    sign = 1.0 - 2.0 * (pair % 2)
    latent = (pair // 2) % channels
    entry = torch.zeros_like(weights["input_blocks.0.0.weight"])
    entry[pair, latent, 1, 1] = sign.half()
    weights["input_blocks.0.0.weight"] = entry
    weights["input_blocks.0.0.bias"] = torch.zeros(width, dtype=torch.float16)
    last = max(int(name.split(".")[1]) for name in weights if name.startswith("output_blocks."))
    name = f"output_blocks.{last}.0.skip_connection.weight"  # [width, h + skip, 1, 1]
    skip = weights[name].float() * 0.25
    skip[:, -width:, 0, 0] = torch.eye(width)
    weights[name] = skip.half()
    attention = f"output_blocks.{last}.1.proj_out.weight"  # not in SDXL; would bury x
    if attention in weights:
        weights[attention] = weights[attention] * 0.2
    weights["out.0.weight"] = torch.ones(width, dtype=torch.float16)
    weights["out.0.bias"] = torch.zeros(width, dtype=torch.float16)
    leave = weights["out.2.weight"].float() * 0.1
    leave[latent, pair, 1, 1] += sign * 2 * channels / width
    weights["out.2.weight"] = leave.half()
    return weights


def _unet(kind: str, random: Random) -> Weights:
    return _steady(random.like(_unet_shapes(kind)), channels=4)


def clip_text(size: tuple[int, int, int], random: Random) -> Weights:
    """Return a CLIP text model of (width, inner width, layers) under transformers' names."""
    width, inner, layers = size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.token_embedding.weight": (_VOCABULARY, width),
        "embeddings.position_embedding.weight": (_POSITIONS, width),
        "final_layer_norm.weight": (width,),
        "final_layer_norm.bias": (width,),
    }
    for layer in range(layers):
        stem = f"encoder.layers.{layer}."
        for part, (rows, columns) in {
            **{f"self_attn.{p}_proj": (width, width) for p in ("q", "k", "v", "out")},
            "mlp.fc1": (inner, width),
            "mlp.fc2": (width, inner),
        }.items():
            shapes[f"{stem}{part}.weight"] = (rows, columns)
            shapes[f"{stem}{part}.bias"] = (rows,)
        for part in ("layer_norm1", "layer_norm2"):
            shapes[f"{stem}{part}.weight"] = shapes[f"{stem}{part}.bias"] = (width,)
    return _prefixed("text_model.", random.like(shapes))


def taesd(random: Random, *, scale: float, shift: float = 0.0, channels: int = 4) -> Weights:
    """Return a TAESD whose last layer makes of unit latents pixels of mean 0.5, deviation 0.2."""
    from comfy.taesd.taesd import TAESD

    shapes = shapes_of(lambda: TAESD(latent_channels=channels))
    shapes = {k: s for k, s in shapes.items() if not k.startswith("vae_")}
    weights = random.like(shapes, gain=1.25, damping=0.5)
    last = max(int(k.split(".")[1]) for k in weights if k.startswith("taesd_decoder."))
    model = TAESD(latent_channels=channels)
    model.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False)
    with torch.no_grad():
        pixels = model.taesd_decoder(torch.randn(1, channels, 16, 16, generator=random.generator))
    factor = 0.2 / pixels.std(dim=(0, 2, 3))
    weight, bias = f"taesd_decoder.{last}.weight", f"taesd_decoder.{last}.bias"
    weights[weight] = (weights[weight].float() * factor.view(-1, 1, 1, 1)).half()
    weights[bias] = (0.5 + (weights[bias].float() - pixels.mean(dim=(0, 2, 3))) * factor).half()
    return weights | {"vae_scale": torch.tensor(scale), "vae_shift": torch.tensor(shift)}


def _prefixed(prefix: str, weights: Weights) -> Weights:
    return {prefix + name: value for name, value in weights.items()}


def _checkpoint(kind: str, random: Random) -> Weights:
    """Return a whole checkpoint: UNet, text encoders, TAESD."""
    xl = kind.endswith("xl")
    size = (64, 128, 3 if xl else 1) if kind.startswith("narrow") else _CLIP_L
    weights = _prefixed("model.diffusion_model.", _unet(kind, random))
    clip_l = clip_text(size, random)
    if xl:
        clip_g = clip_text(size, random)
        projection = random.normal((size[0], size[0]), 1 / math.sqrt(size[0]))
        clip_g["text_projection.weight"] = projection
        weights |= _prefixed("conditioner.embedders.0.transformer.", clip_l)
        weights |= _prefixed("conditioner.embedders.1.model.transformer.", clip_g)
    else:
        weights |= _prefixed("cond_stage_model.transformer.", clip_l)
    return weights | _prefixed(
        "first_stage_model.", taesd(random, scale=0.13025 if xl else 0.18215)
    )


def _lora(base: str, random: Random, *, convolutions: bool, rank: int = 4) -> Weights:
    """Return a LoRA in kohya's names over the transformer blocks, and over each 3x3 if asked."""
    weights: Weights = {}
    for name, shape in sorted(_unet_shapes(base).items()):
        if not name.endswith(".weight") or len(shape) < 2:
            continue
        ends = (".proj_in.weight", ".proj_out.weight")
        linear = ".transformer_blocks." in name or name.endswith(ends)
        if not linear and not (convolutions and shape[2:] == (3, 3)):
            continue
        stem = "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
        down = (rank, *shape[1:])
        up = (shape[0], rank) + (1,) * (len(shape) - 2)
        weights[f"{stem}.lora_down.weight"] = random.normal(down, math.prod(down[1:]) ** -0.5)
        weights[f"{stem}.lora_up.weight"] = random.normal(up, 0.05)
        weights[f"{stem}.alpha"] = torch.tensor(float(rank))
    return weights


def _controlnet(base: str, random: Random) -> Weights:
    import comfy.ops
    from comfy.cldm.cldm import ControlNet

    unused = ("out_channels", "transformer_depth_output")
    config = {key: value for key, value in UNETS[base].items() if key not in unused}
    operations = comfy.ops.disable_weight_init
    weights = random.like(
        shapes_of(
            lambda: ControlNet(**config, hint_channels=3, device="meta", operations=operations)
        )
    )
    for name, value in weights.items():
        if name.startswith(("zero_convs.", "middle_block_out.")) and name.endswith("weight"):
            weights[name] = (value.float() * 0.05).half()
    return weights


def _controllora(base: str, random: Random, *, rank: int = 4) -> Weights:
    """Return a ControlLoRA: up and down for each matrix that the UNet has too, all else whole."""
    unet, weights = _unet_shapes(base), {"lora_controlnet": torch.zeros(0)}
    for name, value in _controlnet(base, random).items():
        stem = name.removesuffix(".weight")
        if name not in unet or value.dim() < 2:
            weights[name] = value
            continue
        ones = (1,) * (value.dim() - 2)
        down = (rank, *value.shape[1:])
        weights[f"{stem}.up"] = random.normal((value.shape[0], rank, *ones), 0.05)
        weights[f"{stem}.down"] = random.normal(down, math.prod(down[1:]) ** -0.5)
    return weights


def _t2i(base: str, random: Random) -> Weights:
    from comfy.t2i_adapter.adapter import Adapter

    xl, width = base.endswith("xl"), UNETS[base]["model_channels"]
    channels = [width, 2 * width, 4 * width, 4 * width]
    planes = 3 * (16 if xl else 8) ** 2
    options = {"nums_rb": 2, "ksize": 1, "sk": True, "use_conv": False, "xl": xl}
    return random.like(shapes_of(lambda: Adapter(cin=planes, channels=channels, **options)))


def _flux(random: Random) -> Weights:
    import comfy.ops
    from comfy.ldm.flux.model import Flux

    operations = comfy.ops.disable_weight_init
    return random.like(shapes_of(lambda: Flux(**FLUX, device="meta", operations=operations)))


def make(kind: str, *, seed: int = 0, base: str | None = None, shared: bool = False) -> Weights:
    """Return the weights of `kind` (see `FOLDERS`), the same for the same arguments.

    Args:
        kind: A key of `FOLDERS`.
        seed: Chooses the weights.
        base: The UNet that a lora, locon or control file is made for, narrowxl by default.
        shared: Let big tensors be views of one small buffer; only a `.ckpt` file can say so.
    """
    if kind not in FOLDERS:
        raise ValueError(f"kind must be one of {', '.join(FOLDERS)}, got {kind!r}")
    base = base or "narrowxl"
    random = Random(zlib.crc32(f"{kind} {base} {seed}".encode()), shared=shared)
    if kind in UNETS:
        return _checkpoint(kind, random)
    if kind == "controlnet":
        return _controlnet(base, random)
    if kind == "controllora":
        return _controllora(base, random)
    if kind == "t2i":
        return _t2i(base, random)
    if kind == "flux":
        return _flux(random)
    return _lora(base, random, convolutions=kind == "locon")


def write(weights: Weights, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write `weights` in one step: safetensors, or a `.ckpt` that keeps shared storage shared.

    Args:
        metadata: what else a safetensors file says of itself.
    """
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{os.getpid()}.{path.name}")
    if path.suffix == ".safetensors":
        held = {name: value.contiguous() for name, value in weights.items()}
        save_file(held, part, metadata={"format": "pt", **(metadata or {})})
    else:
        torch.save({"state_dict": weights}, part)
    os.replace(part, path)


def ensure(
    models: Path,
    kind: str,
    *,
    seed: int = 0,
    base: str | None = None,
    name: str | None = None,
) -> Path:
    """Return the path of a file of `kind` below `models`, written unless it is there.

    Args:
        name: File name, made from the other arguments when empty; with the ending `.ckpt`,
            sd15 (whose text encoder has its full size) takes 16 MB instead of 340.
    """
    stem = "-".join([kind, *([base] if base else []), *([str(seed)] if seed else [])])
    path = models / FOLDERS[kind] / (name or f"{stem}.safetensors")
    if not path.is_file():
        write(make(kind, seed=seed, base=base, shared=path.suffix == ".ckpt"), path)
    return path


def main() -> None:
    """Write the kinds that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", type=Path, required=True, help="the ComfyUI tree")
    parser.add_argument("--models", type=Path, required=True, help="a models directory")
    parser.add_argument("--name", help="file name, when one kind is given")
    parser.add_argument("--base", help="the UNet of a lora, locon or controlnet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("kinds", nargs="+", choices=list(FOLDERS))
    options = parser.parse_args()
    sys.path[0] = str(options.host)
    import comfy.options

    comfy.options.enable_args_parsing(False)
    from comfy.cli_args import args

    args.cpu = True  # before comfy.model_management is imported
    for kind in options.kinds:
        path = ensure(
            options.models,
            kind,
            seed=options.seed,
            base=options.base,
            name=options.name,
        )
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
