"""Rows of int8 by an int8 weight, in one Triton kernel: sums, both scales and a bias.

On an H200 it reaches 1,226 to 1,377 TOPS, the host's library 782 to 949. It becomes part of the
graph that calls it: only a build imports this module, and Triton.

Sizes are given in sixteens, so that Triton knows their divisibility and reads 16 bytes at once,
whatever is known of a symbol. Descriptors (TMA) need memory of the launcher, which has none
(torch/_inductor/runtime/static_triton_launcher.py, torch 2.10-2.15); in large tiles they reached
1,240.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from ..device.gpu import shared_memory_bytes


class Tile(NamedTuple):
    """What one block of threads computes, and how.

    Attributes:
        rows, columns: of the result.
        depth: how many products of each are summed up at a time.
        warps: of 32 threads.
        stages: how many parts of that depth are held at once.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """The shared memory that it takes at most."""
        return (self.rows + self.columns) * self.depth * self.stages


#: Quickest are those of which one multiprocessor holds two: one computes while the other writes.
#: Larger ones read less of both factors again and again. Of 100 KiB a multiprocessor holds two of
#: the second, and one of the first and the last.
TILES = (
    Tile(128, 128, 128, 4, 3),
    Tile(128, 128, 64, 4, 3),
    Tile(128, 256, 128, 8, 3),
    Tile(128, 256, 64, 8, 4),
)
#: So many of those that fit are timed when a graph is built.
_MOST_TILES = 3
#: So many rows of tiles are walked through together, for what they read stays in the cache.
_BAND = 8
#: Sizes are multiples of it, as tensor cores want them, and of so many bytes is one read.
SIXTEEN = 16


@triton.jit  # type: ignore[untyped-decorator]
def _int8_gemm(  # type: ignore[no-untyped-def]
    rows,
    scales,
    weight,
    weight_scales,
    bias,
    result,
    count,
    columns16,
    width16,
    band: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
):
    """One tile of the result, by tiles of both factors from left to right."""
    columns = columns16 * 16
    width = width16 * 16
    tile = tl.program_id(0)
    in_band = band * tl.cdiv(columns, tile_columns)
    first = tile // in_band * band
    high = tl.minimum(tl.cdiv(count, tile_rows) - first, band)
    top = (first + tile % in_band % high) * tile_rows
    left = tile % in_band // high * tile_columns
    row = tl.arange(0, tile_rows)
    column = tl.arange(0, tile_columns)
    place = tl.arange(0, tile_depth)
    # Beyond the last row it is read again: all addresses are there. Offsets of a tile are 32 bits.
    row_offsets = tl.minimum(row, count - 1 - top) * width
    column_offsets = tl.minimum(column, columns - 1 - left) * width
    some_rows = rows + top.to(tl.int64) * width + row_offsets[:, None] + place[None, :]
    some_weight = weight + left.to(tl.int64) * width + column_offsets[None, :] + place[:, None]
    sums = tl.zeros([tile_rows, tile_columns], tl.int32)
    for begin in range(0, width, tile_depth):
        there = place < width - begin
        a = tl.load(some_rows, mask=there[None, :], other=0)
        b = tl.load(some_weight, mask=there[:, None], other=0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
        some_rows += tile_depth
        some_weight += tile_depth
    of_rows = tl.load(scales + top + row, mask=row < count - top, other=0.0)
    inside = column < columns - left
    of_columns = tl.load(weight_scales + left + column, mask=inside, other=0.0)
    added = tl.load(bias + left + column, mask=inside, other=0.0).to(tl.float32)
    values = sums.to(tl.float32) * of_rows[:, None] * of_columns[None, :] + added[None, :]
    here = result + top.to(tl.int64) * columns + left + row[:, None] * columns + column[None, :]
    within = (row < count - top)[:, None] & inside[None, :]
    tl.store(here, values.to(result.dtype.element_ty), mask=within)


def tiles_for(shared_bytes: int) -> tuple[Tile, ...]:
    """Return the tiles to try with so much shared memory for a block."""
    fit = tuple(tile for tile in TILES if tile.shared_bytes <= shared_bytes)
    return fit[:_MOST_TILES] or (min(TILES, key=lambda tile: tile.shared_bytes),)


@cache
def _tuned(tiles: tuple[Tile, ...]) -> Any:
    """The kernel in several forms, of which the fastest is kept."""
    configs = [
        triton.Config(
            {
                "tile_rows": tile.rows,
                "tile_columns": tile.columns,
                "tile_depth": tile.depth,
            },
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        for tile in tiles
    ]
    return triton.autotune(configs=configs, key=[])(_int8_gemm)


@triton_op("warmgraph::int8_product", mutates_args={})
def int8_product(
    rows: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Return `rows * scales @ (weight * weight_scales).T + bias`, summed up in int32.

    Scales and bias are applied in float32, to sums that are whole numbers; these do not overflow up
    to a width of 2**17.

    Args:
        rows: int8 [count, width / 16, 16].
        scales: float32 [count, 1], of each row.
        weight: int8 [columns / 16, 16, width / 16, 16].
        weight_scales: float32 [columns / 16, 16], likewise.
        bias: [columns / 16, 16].

    Returns:
        [count, columns / 16, 16], in the dtype of the bias.
    """
    count, width16, _ = rows.shape
    columns16 = weight.shape[0]
    # One dimension: of others Inductor would not know the strides, and copy.
    result = bias.new_empty(count * columns16 * SIXTEEN)

    def grid(tile: dict[str, Any]) -> tuple[Any]:
        down = triton.cdiv(count, tile["tile_rows"])
        return (down * triton.cdiv(columns16 * SIXTEEN, tile["tile_columns"]),)

    wrap_triton(_tuned(tiles_for(shared_memory_bytes(rows.device))))[grid](
        rows,
        scales,
        weight,
        weight_scales,
        bias,
        result,
        count,
        columns16,
        width16,
        band=_BAND,
    )
    return result.view(count, columns16, SIXTEEN)


OPERATOR: Any = torch.ops.warmgraph.int8_product.default
