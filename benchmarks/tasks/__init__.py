"""What a child process can be asked to do: name -> function of JSON arguments to a JSON result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import build, changes, files, image, residency, rival, speed

TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "make_files": files.make_files,
    "cold_build": build.cold_build,
    "bind": build.bind,
    "speed": speed.speed,
    "rival": rival.rival,
    "changes": changes.changes,
    "first_image": image.first_image,
    "equal_to_eager": residency.equal_to_eager,
    "lora_swaps": residency.lora_swaps,
    "vram_footprint": residency.vram_footprint,
}
