"""What must be equal for two calls of a UNet to share a deep feature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..host_api.options import window_of


class CallShape(NamedTuple):
    """What must be equal for two calls to share a feature, besides their patches.

    Attributes:
        chunks: the conditioning of each part of the batch, by the host's ids and in its order.
        frames: those of the context window that is computed, if one is.
        tensors: shape, dtype and device of the inputs.
        residuals: how many residuals each side of the UNet gets.
    """

    chunks: tuple[Any, ...]
    frames: tuple[int, ...]
    tensors: tuple[Any, ...]
    residuals: tuple[Any, ...]

    @property
    def structure(self) -> tuple[Any, ...]:
        """The same without the conditionings' ids."""
        return len(self.chunks), len(self.frames), self.tensors, self.residuals


def bytes_of(features: Iterable[torch.Tensor]) -> int:
    """Return the memory that features hold."""
    return sum(each.numel() * each.element_size() for each in features)


def shape_of(
    x: torch.Tensor,
    context: torch.Tensor | None,
    y: torch.Tensor | None,
    control: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> CallShape:
    """Describe a call of the UNet; no tensor's content is read."""
    chunks = tuple(zip(options.get("uuids", ()), options.get("cond_or_uncond", ()), strict=False))
    tensors = tuple(
        None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.device)
        for tensor in (x, context, y)
    )
    residuals = tuple(
        (side, tuple(r is not None for r in given))
        for side, given in sorted((control or {}).items())
        if isinstance(given, (list, tuple))
    )
    return CallShape(chunks, window_of(options), tensors, residuals)
