"""Make model files, drawn on the GPU where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..measure import Stopwatch
from ..models import write_lora, write_unet


def make_files(files: list[dict[str, Any]]) -> dict[str, Any]:
    """Write each missing file: {"path", "kind", "seed"} and "dtype", or "lora" linear or conv."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = {}
    for file in files:
        path = Path(file["path"])
        if path.exists():
            continue
        watch = Stopwatch()
        if "lora" in file:
            conv = file["lora"] == "conv"
            size = write_lora(path, file["kind"], conv=conv, seed=file["seed"], device=device)
        else:
            size = write_unet(
                path, file["kind"], dtype=file["dtype"], seed=file["seed"], device=device
            )
        made[path.name] = {"mb": round(size / 1e6, 1), "seconds": round(watch.seconds(), 2)}
    return {"made": made}
