"""Small questions to the host about a loaded model and about itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ..building.pacing import worker_count

_SAMPLING_VRAM = 2 << 30


def host_arguments() -> dict[str, Any]:
    """Return what a worker needs to import the host as this process did."""
    import comfy

    return {
        "argv": _parsed_arguments(),
        "host": str(Path(next(iter(comfy.__path__))).parent),
        "cwd": os.getcwd(),
    }


def _parsed_arguments() -> list[str]:
    """The command line that the host parsed; empty where it was started without parsing one."""
    import comfy.options

    if comfy.options.args_parsing:
        return list(sys.argv)
    from comfy.cli_args import args

    flags = ["main.py"]
    if args.cpu:
        flags.append("--cpu")
    if args.use_pytorch_cross_attention:
        flags.append("--use-pytorch-cross-attention")
    return flags


def compute_dtype(patcher: Any) -> torch.dtype:
    """Return the dtype in which a model's operators compute."""
    manual: torch.dtype | None = patcher.get_model_object("manual_cast_dtype")
    stored: torch.dtype = patcher.model.get_dtype()
    return manual if manual is not None else stored


def pause_host_compiler() -> AbstractContextManager[Any]:
    """Keep the host's own compiler (ComfyUI 0.33 and newer) from recording what runs inside.

    Its recording counts foreign allocations as faults; hosts without it have nothing to pause.
    """
    prefetch = sys.modules.get("comfy.model_prefetch")
    pause = getattr(prefetch, "pause_malloc_graph", None)
    scope = pause() if callable(pause) else None
    return scope if isinstance(scope, AbstractContextManager) else nullcontext()


def is_interrupt(error: BaseException) -> bool:
    """Tell whether an error is the host's way to end a prompt that the user cancelled."""
    from comfy.model_management import InterruptProcessingException

    return isinstance(error, InterruptProcessingException)


def total_vram(device: torch.device) -> int:
    """Bytes of memory of the host's device, as the host counts them."""
    import comfy.model_management

    return int(comfy.model_management.get_total_memory(device))


def spare_vram(patchers: Iterable[Any]) -> int | None:
    """Return the bytes of VRAM that sampling with all these models will not need.

    None without CUDA.
    """
    models = {id(p.model): p for p in patchers if p.load_device.type == "cuda"}
    if not models:
        return None
    free, _ = torch.cuda.mem_get_info(next(iter(models.values())).load_device)
    to_load = sum(max(0, p.model_size() - p.loaded_size()) for p in models.values())
    return max(0, int(free - to_load - _SAMPLING_VRAM))


def room_for_workers(setting: int, free_vram: int | None) -> int:
    """Return how many build workers this machine has room for now.

    Args:
        setting: the user's upper bound, 0 for automatic.
        free_vram: bytes of VRAM that sampling does not need, None without a GPU.
    """
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free_ram = psutil.virtual_memory().available
    return worker_count(cores or 1, setting, free_ram, free_vram)


def run_forward(patcher: Any, batch: int, height: int, width: int) -> None:
    """Run one model evaluation on empty inputs, with the patcher's own wrappers.

    Args:
        batch: rows of the batch as the model sees it.
        height, width: sides of the latent.
    """
    import comfy.model_management as management
    from comfy.patcher_extension import merge_nested_dicts

    management.load_models_gpu([patcher])
    model, device = patcher.model, patcher.load_device
    config = model.model_config.unet_config
    options = dict(patcher.model_options.get("transformer_options", {}))
    options["wrappers"] = merge_nested_dicts(options.get("wrappers", {}), patcher.wrappers)
    extra: dict[str, Any] = {}
    if config.get("adm_in_channels"):
        extra["y"] = torch.zeros(batch, config["adm_in_channels"], device=device)
    patcher.pre_run()
    try:
        with torch.inference_mode():
            channels = model.latent_format.latent_channels
            concatenated = config["in_channels"] - channels  # inpainting: mask and masked image
            if concatenated:
                extra["c_concat"] = torch.zeros(batch, concatenated, height, width, device=device)
            model.apply_model(
                torch.zeros(batch, channels, height, width, device=device),
                torch.ones(batch, device=device),
                c_crossattn=torch.zeros(batch, 77, config["context_dim"], device=device),
                transformer_options=options,
                **extra,
            )
    finally:
        patcher.cleanup()
