"""Diffusion transformers of the host that have no regions: their whole steps alone are captured.

Listed is a model whose own forward neither reads from the GPU nor copies to it, whatever its class
takes besides its latent (`tests/engine/test_device_copies.py`). Not listed, for theirs does: LTXV
(keyframes are picked by what they hold), HiDream and MiniMax.
"""

from __future__ import annotations

from typing import Any

from ..plans.family import Family
from ..reasons import Reason, of
from . import dit

_LDM = "comfy.ldm"


def _no_regions(model: Any) -> Reason:
    return of("unless_captured", why=of("no_regions", model=type(model).__name__))


FAMILY = Family(
    title="Models without regions",
    roots={
        f"{_LDM}.{name}": _no_regions
        for name in (
            "cosmos.model:GeneralDIT",
            "aura.mmdit:MMDiT",
            "kandinsky5.model:Kandinsky5",
            "omnigen.omnigen2:OmniGen2Transformer2DModel",
            "ernie.model:ErnieImageModel",
        )
    },
    forms={},
    may_be_captured=lambda root: True,
    unread=dit.UNREAD_OPTIONS,
)
