"""What a VAE is: its first-stage model, its patcher, where it computes.

Relies on the host's `comfy/sd.py` (`VAE`).
"""

from __future__ import annotations

import sys
from typing import Any

import torch

#: The public methods of a VAE, each of which runs the first-stage model.
METHODS = ("decode", "decode_tiled", "encode", "encode_tiled")
#: What they call on it.
CALLS = ("decode", "encode")


def is_vae(thing: Any) -> bool:
    """Tell whether a thing is a VAE of the host."""
    cls = getattr(sys.modules.get("comfy.sd"), "VAE", None)
    return cls is not None and isinstance(thing, cls)


def first_stage_model(vae: Any) -> torch.nn.Module | None:
    """Return the module with a VAE's weights, None where the host has loaded none."""
    root: torch.nn.Module | None = getattr(vae, "first_stage_model", None)
    return root


def patcher(vae: Any) -> Any:
    """Return the ModelPatcher of a VAE's weights, or None."""
    return getattr(vae, "patcher", None)


def put_patcher(vae: Any, other: Any) -> None:
    """Give a VAE another ModelPatcher."""
    vae.patcher = other


def compute_dtype(vae: Any) -> torch.dtype:
    """Return the dtype in which a VAE computes."""
    dtype: torch.dtype = vae.vae_dtype
    return dtype
