"""A VAE: its first-stage model, patcher and dtype.

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
    cls = getattr(sys.modules.get("comfy.sd"), "VAE", None)
    return cls is not None and isinstance(thing, cls)


def first_stage_model(vae: Any) -> torch.nn.Module | None:
    """Return the module with a VAE's weights, None if none are loaded."""
    root: torch.nn.Module | None = getattr(vae, "first_stage_model", None)
    return root


def patcher(vae: Any) -> Any:
    return getattr(vae, "patcher", None)


def put_patcher(vae: Any, other: Any) -> None:
    vae.patcher = other


def compute_dtype(vae: Any) -> torch.dtype:
    dtype: torch.dtype = vae.vae_dtype
    return dtype
