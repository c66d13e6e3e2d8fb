"""What the host, and nodes by its leave, put into a call's `transformer_options`.

Relies on the host's `comfy/samplers.py`, `comfy/model_base.py` (`_apply_model`) and
`comfy/ldm/modules/diffusionmodules/openaimodel.py`, which read them.
"""

from __future__ import annotations

import torch

#: What no diffusion model reads in its own forward.
UNREAD = frozenset({"callbacks", "prefetch_dynamic_vbars", "uuids", "wrappers"})
#: And what a UNet does not read besides: it is there for patches of other nodes.
_UNREAD_BY_UNETS = UNREAD | {"cond_or_uncond", "sample_sigmas", "sigmas"}
#: Where nodes put functions of their own.
PATCHES, REPLACEMENTS = "patches", "patches_replace"
ATTENTION = "optimized_attention_override"
#: What the host's EasyCache and LazyCache leave there.
EASY_CACHE = "easycache"

_UNET = "comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel"
#: Modules whose forward neither waits for the GPU nor keeps a tensor beyond the call.
_CAPTURABLE = (_UNET, "comfy.cldm.cldm:ControlNet")


def unread_options(root: torch.nn.Module) -> frozenset[str]:
    """Return the names of the options that a diffusion model's own forward does not read."""
    return _UNREAD_BY_UNETS if _name(root) == _UNET else UNREAD


def is_capturable(root: torch.nn.Module) -> bool:
    """Tell whether a module's forward is known to do nothing that a capture must not meet.

    A union ControlNet copies its choice of control to the GPU in each call.
    """
    return _name(root) in _CAPTURABLE and getattr(root, "control_add_embedding", None) is None


def _name(root: torch.nn.Module) -> str:
    return f"{type(root).__module__}:{type(root).__qualname__}"
