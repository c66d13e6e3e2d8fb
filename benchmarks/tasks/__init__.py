"""What a child process can be asked to do: name -> function of JSON arguments to a JSON result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import (
    beside,
    build,
    captured,
    changes,
    control,
    deepcache,
    dispatch,
    files,
    forms,
    image,
    overcommit,
    residency,
    rival,
    rivals,
    small_cards,
    soak,
    speed,
    users_run,
    vae,
    vae_memory,
    video_vae,
    vram,
)

TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "make_files": files.make_files,
    "cold_build": build.cold_build,
    "bind": build.bind,
    "speed": speed.speed,
    "rival": rival.rival,
    "rivals": rivals.rivals,
    "beside": beside.beside,
    "captured_exact": captured.exact,
    "captured_forms": forms.forms,
    "captured_failures": captured.failures,
    "soak": soak.soak,
    "changes": changes.changes,
    "deepcache": deepcache.deepcache,
    "dispatch": dispatch.dispatch,
    "first_image": image.first_image,
    "vae_speed": vae.vae_speed,
    "vae_fill": vae.vae_fill,
    "vae_memory": vae_memory.vae_memory,
    "vae_wide": vae.vae_wide,
    "video_vae": video_vae.video_vae,
    "users_run": users_run.users_run,
    "controlnet": control.controlnet,
    "controls_overcommitted": overcommit.controls_overcommitted,
    "vae_overcommitted": overcommit.vae_overcommitted,
    "vram_sizes": vram.vram_sizes,
    "small_card": small_cards.small_card,
    "forms_batches": forms.batches,
    "equal_to_eager": residency.equal_to_eager,
    "lora_swaps": residency.lora_swaps,
    "vram_footprint": residency.vram_footprint,
}
