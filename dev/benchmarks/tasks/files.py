"""Make model files, drawn on the GPU where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..measure import Stopwatch
from ..models import (
    VAES,
    write_controllora,
    write_controlnet,
    write_lora,
    write_unet,
    write_vae,
)


def make_files(files: list[dict[str, Any]]) -> dict[str, Any]:
    """Write each missing file: {"path", "kind", "seed"} and one of "dtype", "lora",
    "controlnet", "controllora".

    "lora" is linear or conv.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = {}
    for file in files:
        path = Path(file["path"])
        if path.exists():
            continue
        watch = Stopwatch()
        kind = file["kind"]
        drawn: dict[str, Any] = {"seed": file["seed"], "device": device}
        if "lora" in file:
            size = write_lora(path, kind, conv=file["lora"] == "conv", **drawn)
        elif "controlnet" in file:
            size = write_controlnet(path, kind, **drawn)
        elif "controllora" in file:
            size = write_controllora(path, kind, **drawn)
        else:
            write = write_vae if kind in VAES else write_unet
            size = write(path, kind, dtype=file["dtype"], **drawn)
        made[path.name] = {"mb": round(size / 1e6, 1), "seconds": round(watch.seconds(), 2)}
    return {"made": made}
