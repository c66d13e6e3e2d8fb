"""Joining channels-last images by their channels, at the speed of memory.

`torch.cat` of such images computes an address for each two-byte element: a UNet's skip connections
cost as much as its smaller convolutions. The same bytes, seen as rows of 16-byte elements, are
joined many times faster, and bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_WIDE = torch.complex128  # torch's largest element
_BYTES = 16


class QuickJoins(TorchFunctionMode):
    """While this is entered, in this thread, `torch.cat` joins channels-last images quickly.

    Meant for captures: what is captured is replayed without it.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.cat and (joined := _join(*args, **(kwargs or {}))) is not None:
            return joined
        return func(*args, **(kwargs or {}))


def _join(tensors: Any, dim: Any = 0, **others: Any) -> torch.Tensor | None:
    """The images joined by their channels, None for anything else that can be asked of `cat`."""
    if others or dim != 1 or not isinstance(tensors, (list, tuple)) or not _are_wide(tensors):
        return None
    rows = [tensor.permute(0, 2, 3, 1).view(_WIDE) for tensor in tensors]
    return torch.cat(rows, -1).view(tensors[0].dtype).permute(0, 3, 1, 2)


def _are_wide(tensors: Sequence[Any]) -> bool:
    return (
        len(tensors) > 1
        and all(type(tensor) is torch.Tensor and tensor.dim() == 4 for tensor in tensors)
        and len({(t.shape[0], t.shape[2:], t.dtype, t.device) for t in tensors}) == 1
        and not tensors[0].is_complex()
        and all(_is_wide(tensor) for tensor in tensors)
    )


def _is_wide(tensor: torch.Tensor) -> bool:
    """Whether each pixel's channels are whole 16-byte elements at such an address."""
    size = tensor.element_size()
    _, channels, height, width = tensor.shape
    return (
        tensor.numel() > 0
        # Not by torch's word: a side of one may have any stride.
        and tensor.stride() == (height * width * channels, 1, width * channels, channels)
        and not tensor.is_contiguous()
        and channels * size % _BYTES == 0
        and tensor.storage_offset() * size % _BYTES == 0
        and tensor.data_ptr() % _BYTES == 0
    )
