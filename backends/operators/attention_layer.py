"""A layer's own attention, which a file may name for it (ComfyUI 0.35 and newer). Like all
attention it is called when a graph runs, so graphs do not depend on it.
"""

from __future__ import annotations

from typing import Any

import torch

from ..host_api import attention
from .stand_in import StandIn

#: What stands for the class of such a layer in a description.
CLASS = "the host's attention"


class AttentionLayer(StandIn):
    """Stands in a twin for the part of a layer that names its attention; the host's own is used."""

    function = config = None


def describe(path: str, layer: torch.nn.Module) -> dict[str, Any] | None:
    """Describe such a part; None for anything else.

    Args:
        path: where it is in the region's module.
    """
    if not attention.is_layer(layer) or layer._parameters or layer._modules:
        return None
    return {"class": CLASS, "attributes": {"path": path}, "parameters": {}, "modules": []}
