"""The memory layout of a region's activations, a part of its kind.

Channels-last suits convolutions: vendor kernels read and write it without transposing. It applies
only to images and videos, of four and five dimensions; everything else is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..contract import CHANNELS_LAST as CHANNELS_LAST
from ..contract import CONTIGUOUS as CONTIGUOUS

#: In bytes, of the addresses of what a graph takes.
ALIGNMENT = 16

#: What it depends on of a region's inputs whether a graph takes them.
InputForm = tuple[Any, ...]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def form_of(inputs: Sequence[Any]) -> InputForm:
    """Return the form of a call's inputs: of tensors everything but their values."""
    return tuple(
        [
            (v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % ALIGNMENT)
            if type(v) is torch.Tensor
            else (type(v), v if isinstance(v, int) else None)
            for v in inputs
        ]
    )


def is_laid_out(tensor: torch.Tensor, layout: str) -> bool:
    """Tell whether a tensor has this layout, as graphs read and write it."""
    return tensor.is_contiguous(memory_format=memory_format(tensor, layout))


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the tensor itself if it has this layout, else a copy that has.

    A dimension of 1 may have any stride, and vendor kernels derive the layout from the strides: a
    batch of one with an odd stride would come out contiguous.
    """
    laid_out = tensor.contiguous(memory_format=memory_format(tensor, layout))
    if layout == CHANNELS_LAST and laid_out.dim() in _CHANNELS_LAST:
        _, channels, *sides = laid_out.shape
        strides = [channels * math.prod(sides[i + 1 :]) for i in range(-1, len(sides))]
        strides.insert(1, 1)
        if laid_out.stride() != tuple(strides):
            return laid_out.as_strided(laid_out.shape, strides)
    return laid_out


def memory_format(tensor: torch.Tensor, layout: str) -> torch.memory_format:
    """Return torch's name for a layout of this tensor."""
    if layout == CHANNELS_LAST:
        return _CHANNELS_LAST.get(tensor.dim(), torch.contiguous_format)
    return torch.contiguous_format


def aligned(value: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor as graphs take it, in this layout and aligned; another one is copied, as
    operators would.
    """
    laid_out = lay_out(value, layout)
    return laid_out.clone() if laid_out.data_ptr() % ALIGNMENT else laid_out


def elements_of(values: Iterable[Any]) -> tuple[int, tuple[int, ...]]:
    """Return the elements of the first tensor among a call's arguments, and its sort: the numbers
    of its dimensions and channels. 1 and nothing without a tensor.
    """
    for each in values:
        if isinstance(each, torch.Tensor):
            return each.numel(), (each.dim(), *each.shape[1:2])
    return 1, ()
