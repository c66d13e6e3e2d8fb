"""The factor and offset of each channel in a group norm over images, by two Triton kernels.

A norm over `[batch, C, height, width]` in channels-last order is one factor and one offset for each
channel of each image. Inductor's own sums of so many pixels, whose number it must leave open, take
up to twice as long, and their sums by groups another kernel. Ours become part of the graph that
calls them: only a build imports this module, and Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

#: Pixels and channels of a block that is read at once, and how many sums a channel has at most.
_ROWS = 128
_CHANNELS = 64
_SPLITS = 128


@triton.jit  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    images,
    means,
    squares,
    pixels,
    tiles,
    splits,
    channels: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Mean, and sum of squares around it, of some pixels of some channels of one image."""
    split = tl.program_id(0)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    batch = tl.program_id(2).to(tl.int64)
    inside = channel < channels
    images += batch * pixels * channels
    first = split * tiles * block_rows
    count = 0.0
    mean = tl.zeros([block_channels], tl.float32)
    square = tl.zeros([block_channels], tl.float32)
    for tile in range(tiles):
        begin = first + tile * block_rows
        row = (begin + tl.arange(0, block_rows)).to(tl.int64)
        there = (row[:, None] < pixels) & inside[None, :]
        place = row[:, None] * channels + channel[None, :]
        values = tl.load(images + place, mask=there, other=0.0).to(tl.float32)
        more = tl.minimum(tl.maximum(pixels - begin, 0), block_rows).to(tl.float32)
        tile_mean = tl.sum(values, 0) / tl.maximum(more, 1.0)
        off = tl.where(there, values - tile_mean[None, :], 0.0)
        total = count + more
        share = more / tl.maximum(total, 1.0)
        step = tile_mean - mean
        square += tl.sum(off * off, 0) + step * step * count * share
        mean += step * share
        count = total
    place = (batch * splits + split) * channels + channel
    tl.store(means + place, mean, mask=inside)
    tl.store(squares + place, square, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    means,
    squares,
    addend,
    added,
    weight,
    bias,
    factors,
    offsets,
    addend_batch,
    pixels,
    rows,
    splits,
    groups: tl.constexpr,
    width: tl.constexpr,
    epsilon: tl.constexpr,
    has_addend: tl.constexpr,
    has_added: tl.constexpr,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    block_splits: tl.constexpr,
    block_width: tl.constexpr,
):
    """Factor and offset of the channels of one group of one image."""
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, block_width)
    inside = column < width
    channel = tl.program_id(0) * width + column
    split = tl.arange(0, block_splits)
    count = tl.minimum(tl.maximum(pixels - split * rows, 0), rows).to(tl.float32)
    there = (split < splits)[:, None] & inside[None, :]
    place = (batch * splits + split[:, None]) * (groups * width) + channel[None, :]
    mean = tl.load(means + place, mask=there, other=0.0)
    square = tl.load(squares + place, mask=there, other=0.0)
    center = tl.sum(mean * count[:, None], 0) / pixels
    off = tl.where(there, mean - center[None, :], 0.0)
    spread = tl.sum(square + off * off * count[:, None], 0) / pixels
    if has_addend:
        here = addend + batch * addend_batch + channel
        center += tl.load(here, mask=inside, other=0.0).to(tl.float32)
    if has_added:
        center += tl.load(added + channel, mask=inside, other=0.0).to(tl.float32)
    middle = tl.sum(tl.where(inside, center, 0.0), 0) / width
    away = tl.where(inside, center - middle, 0.0)
    variance = tl.sum(tl.where(inside, spread, 0.0) + away * away, 0) / width
    factor = tl.zeros([block_width], tl.float32) + tl.rsqrt(variance + epsilon)
    if has_weight:
        factor *= tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    offset = -middle * factor
    if has_bias:
        offset += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    place = batch * (groups * width) + channel
    tl.store(factors + place, factor, mask=inside)
    tl.store(offsets + place, offset, mask=inside)


@triton_op("warmgraph::group_moments", mutates_args={})
def group_moments(
    images: torch.Tensor,
    addend: torch.Tensor | None,
    added: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factor and offset by which `x * factor + offset` is the group norm of `x = images
    + addend + added`.

    Args:
        images: [batch, C, height, width], channels-last.
        addend: [batch, C] to be added to each pixel, a batch's channels adjacent in memory.
        added: [C], likewise.
        weight: [C] of the norm.
        bias: as `weight`.
        groups: of channels.
        epsilon: is added to variances.

    Returns:
        Twice [batch, C] in float32.
    """
    batch, channels, height, width = images.shape
    pixels = height * width
    tiles = triton.cdiv(pixels, _ROWS * _SPLITS)
    splits = triton.cdiv(pixels, _ROWS * tiles)
    # One symbol in the first dimension: of others Inductor would not know the strides, and copy.
    sums = (batch * splits, channels)
    means, squares = (images.new_empty(sums, dtype=torch.float32) for _ in range(2))
    blocks = triton.cdiv(channels, _CHANNELS)
    wrap_triton(_sum)[(splits, blocks, batch)](
        images,
        means,
        squares,
        pixels,
        tiles,
        splits,
        channels=channels,
        block_rows=_ROWS,
        block_channels=_CHANNELS,
    )
    factors, offsets = (images.new_empty(batch, channels, dtype=torch.float32) for _ in range(2))

    def or_any(tensor: torch.Tensor | None) -> torch.Tensor:
        return means if tensor is None else tensor

    wrap_triton(_combine)[(groups, batch)](
        means,
        squares,
        or_any(addend),
        or_any(added),
        or_any(weight),
        or_any(bias),
        factors,
        offsets,
        0 if addend is None else addend.stride(0),
        pixels,
        _ROWS * tiles,
        splits,
        groups=groups,
        width=channels // groups,
        epsilon=epsilon,
        has_addend=addend is not None,
        has_added=added is not None,
        has_weight=weight is not None,
        has_bias=bias is not None,
        block_splits=_SPLITS,
        block_width=triton.next_power_of_2(channels // groups),
    )
    return factors, offsets


OPERATOR: Any = torch.ops.warmgraph.group_moments.default
