"""Diffusion transformers without regions, of which only whole steps are captured.

Their forward must neither read from the GPU nor copy to it (`tests/engine/test_device_copies.py`).
Not listed, since theirs does: LTXV (picks keyframes by content), HiDream, MiniMax.
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
