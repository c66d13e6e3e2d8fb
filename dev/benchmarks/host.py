"""Boot a real ComfyUI in this process as its `main.py` does, and do its nodes' work.

Nothing of the host may have been imported before `boot`, torch neither: the allocator and dynamic
VRAM are chosen before. The host's `nodes` and `server` modules are not imported (they need packages
that a bare GPU machine lacks); `ksampler` does what the KSampler node does, through `comfy.sample`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .models import KINDS, register_narrow, vae_config
from .pack import import_engine_package

logger = logging.getLogger(__name__)


class HostFacts(NamedTuple):
    """What the booted host runs on."""

    version: str
    torch: str
    gpu: str
    dynamic_vram: bool
    allocator: str


class Size(NamedTuple):
    """An image's size in pixels and its batch."""

    width: int
    height: int
    batch: int = 1


def boot(
    tree: Path,
    argv: Sequence[str],
    *,
    base: Path,
    narrow: bool = False,
    pretended: str | None = None,
) -> HostFacts:
    """Import the host under these command-line arguments.

    Args:
        tree: the ComfyUI tree.
        argv: arguments as after `main.py`; empty is the host's default, with dynamic VRAM and
            cudaMallocAsync on CUDA.
        base: the base directory (models, user, output), so that nothing is written into the tree.
        narrow: register the narrow kinds.
        pretended: a GPU that torch is told of in the place of those here; without dynamic VRAM.

    Raises:
        RuntimeError: if torch or the host was imported before.
    """
    if "torch" in sys.modules or "comfy" in sys.modules:
        raise RuntimeError("the host must be booted before torch or comfy is imported")
    for name in ("models", "custom_nodes", "user", "output", "input", "temp"):
        (base / name).mkdir(parents=True, exist_ok=True)
    sys.argv = [str(tree / "main.py"), "--base-directory", str(base), *argv]
    sys.path.insert(0, str(tree))

    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy_aimdo.control
    from comfy.cli_args import args, enables_dynamic_vram

    if enables_dynamic_vram():
        _start_aimdo(comfy_aimdo.control, args)
    import cuda_malloc  # noqa: F401  - chooses the allocator before torch is imported
    import torch

    if pretended is not None:
        import_engine_package("torch_api.cuda_pretended").pretend(pretended)
    torch.set_grad_enabled(False)
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher
    import comfy.sample
    import comfy.sd
    import comfyui_version

    if enables_dynamic_vram() and comfy.model_management.is_nvidia():
        _enable_dynamic_vram(comfy_aimdo.control, args)
    if narrow:
        register_narrow()
    cuda = torch.cuda.is_available() and not args.cpu
    return HostFacts(
        version=comfyui_version.__version__,
        torch=torch.__version__,
        gpu=torch.cuda.get_device_name() if cuda else "none",
        dynamic_vram=bool(comfy.memory_management.aimdo_enabled),
        allocator=torch.cuda.get_allocator_backend() if cuda else "none",
    )


def _start_aimdo(control: Any, args: Any) -> None:
    """Load comfy-aimdo before torch; its older releases take fewer arguments."""
    headroom = None if args.reserve_vram is None else int(args.reserve_vram * 1024**3)
    try:
        control.init(simple_vram_headroom=headroom, nvml_pressure=not args.disable_nvml_pressure)
    except (TypeError, AttributeError):
        control.init()


def _enable_dynamic_vram(control: Any, args: Any) -> None:
    """Switch the host to its dynamic patcher, or fail: no falling back without a word."""
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    devices = [device.index for device in comfy.model_management.get_all_torch_devices()]
    headroom = int(args.vram_headroom * 1024**3)
    try:
        started = control.init_devices((index, headroom) for index in devices)
    except TypeError:
        started = control.init_devices(iter(devices))
    if not started:
        raise RuntimeError("dynamic VRAM must start, got a comfy-aimdo that cannot use this GPU")
    control.set_log_info()  # its own default writes megabytes a second and slows the host
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    comfy.memory_management.aimdo_enabled = True


def load_unet(path: Path) -> Any:
    """Load a file as the UNETLoader node does, with the host's own detection."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path))


def load_lora(model: Any, path: Path, strength: float) -> Any:
    """Apply a LoRA file as the LoraLoader node does; the model that comes in is not changed."""
    import comfy.sd
    import comfy.utils

    lora = comfy.utils.load_torch_file(str(path), safe_load=True)
    patched, _ = comfy.sd.load_lora_for_models(model, None, lora, strength, 0.0)
    return patched


def load_vae(path: Path, kind: str, *, dtype: Any = None) -> Any:
    """Load a file as the VAELoader node does; the narrow kind, not detected, by its config.

    Args:
        dtype: what it computes in; None is what the host's flags and the device say.
    """
    import comfy.sd
    import comfy.utils

    weights = comfy.utils.load_torch_file(str(path))
    config = None if kind == "vae" else {"params": vae_config(kind)}
    return comfy.sd.VAE(sd=weights, config=config, dtype=dtype)


def load_controlnet(path: Path) -> Any:
    """Load a file as the ControlNetLoader node does."""
    import comfy.controlnet

    return comfy.controlnet.load_controlnet(str(path))


def apply_controlnet(
    control: Any, prompts: Sequence[list[Any]], hint: Any, *, strength: float
) -> tuple[Any, list[list[Any]]]:
    """Apply a ControlNet as the ControlNetApplyAdvanced node does to prompts without one.

    Args:
        hint: image [batch, height, width, 3].

    Returns:
        The applied copy, which all prompts share, and the prompts with it.
    """
    applied = control.copy().set_cond_hint(hint.movedim(-1, 1), strength, (0.0, 1.0))
    applied.set_previous_controlnet(None)
    extra = {"control": applied, "control_apply_to_uncond": False}
    return applied, [[[tokens, {**rest, **extra}] for tokens, rest in prompt] for prompt in prompts]


def conditioning(kind: str, *, tokens: int = 77, seed: int = 0) -> list[Any]:
    """A prompt's conditioning made by hand: unit-variance tokens and pooled output, on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    context = torch.randn(1, tokens, KINDS[kind].tokens_width, generator=generator)
    extra = {}
    pooled = KINDS[kind].pooled_width
    if pooled is not None:
        extra["pooled_output"] = torch.randn(1, pooled, generator=generator)
    return [[context, extra]]


def empty_latent(model: Any, size: Size, *, frames: int = 1) -> Any:
    """An empty latent of a model's own format, as the Empty Latent nodes make it."""
    import comfy.model_management
    import torch

    form = model.get_model_object("latent_format")
    scale = getattr(form, "spacial_downscale_ratio", 8)
    middle = (frames,) * (form.latent_dimensions - 2)
    shape = (size.batch, form.latent_channels, *middle, size.height // scale, size.width // scale)
    return torch.zeros(shape, device=comfy.model_management.intermediate_device())


def ksampler(
    model: Any,
    positive: list[Any],
    negative: list[Any],
    size: Size,
    *,
    steps: int,
    cfg: float = 7.0,
    seed: int = 0,
    sampler: str = "euler",
    scheduler: str = "normal",
    denoise: float = 1.0,
    latent: Any = None,
    noise_mask: Any = None,
    on_step: Callable[[int], None] | None = None,
) -> Any:
    """Sample as the KSampler node does, with the host's clean-up after it; a latent on the CPU.

    Args:
        latent: what to start from; None is an empty one of `size`, which is not asked for else.
        noise_mask: what of it is to be made; None is all.
    """
    import comfy.sample
    import latent_preview

    if latent is None:
        latent = empty_latent(model, size)
    latent = comfy.sample.fix_empty_latent_channels(model, latent)
    preview = latent_preview.prepare_callback(model, steps)

    def callback(step: int, x0: Any, x: Any, total: int) -> None:
        preview(step, x0, x, total)
        if on_step is not None:
            on_step(step)

    try:
        samples = comfy.sample.sample(
            model,
            comfy.sample.prepare_noise(latent, seed),
            steps,
            cfg,
            sampler,
            scheduler,
            positive,
            negative,
            latent,
            denoise=denoise,
            noise_mask=noise_mask,
            callback=callback,
            disable_pbar=True,
            seed=seed,
        )
    finally:
        end_node()
    return samples.cpu()


def end_node() -> None:
    """What the host's executor does after every node when dynamic VRAM is on."""
    import comfy.memory_management
    import comfy.model_management

    if not comfy.memory_management.aimdo_enabled:
        return
    import comfy.model_prefetch
    import comfy_aimdo.model_vbar

    comfy.model_management.reset_cast_buffers()
    comfy.model_prefetch.cleanup_prefetch_queues()
    comfy_aimdo.model_vbar.vbars_reset_watermark_limits()


def synchronize() -> None:
    """Wait until the GPU has done all that was queued; nothing to wait for on a CPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
