"""The products of a few rows by two weights, such as a text's keys and values, in one Triton
kernel.

By itself each of them is too small for the GPU: it waits for its weight to arrive. Together they
wait once. The kernel becomes part of the graph that calls it: only who builds a graph imports this
module, and Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from ..device.gpu import is_gpu

#: Quickest of 32-128 rows, 32-128 columns, 64 and 128 deep, 4 and 8 warps, 3-6 stages over 77-308
#: rows of SDXL's texts (H200), where the blocks of both products are at once on the GPU.
_ROWS = 64
_COLUMNS = (32, 64, 128)
_DEPTH = 64
_STAGES = 6


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    source,
    first,
    second,
    first_out,
    second_out,
    rows,
    columns: tl.constexpr,
    depth: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
):
    """One block of one product; blocks that share a weight's rows are neighbours."""
    if tl.program_id(2) == 0:
        weight = first
        out = first_out
    else:
        weight = second
        out = second_out
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    place = tl.arange(0, block_depth)
    there = row[:, None] < rows
    source += row[:, None] * depth + place[None, :]
    weight += column[None, :] * depth + place[:, None]
    sums = tl.zeros([block_rows, block_columns], tl.float32)
    for start in range(0, depth, block_depth):
        left = tl.load(source + start, mask=there, other=0.0)
        sums = tl.dot(left, tl.load(weight + start), sums)
    out += row[:, None] * columns + column[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=there)


@triton_op("warmgraph::twin_product", mutates_args={})
def twin_product(
    source: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `source @ first.T` and `source @ second.T`.

    Args:
        source: [..., depth] in float16 or bfloat16, contiguous as all of them.
        first: [columns, depth]; both are multiples of `products.MULTIPLE`.
        second: as `first`.

    Returns:
        Twice [..., columns].
    """
    columns, depth = first.shape
    rows = source.numel() // depth
    outs = tuple(source.new_empty(*source.shape[:-1], columns) for _ in range(2))
    block = block_columns(rows, columns, _processors(source.device))
    wrap_triton(_multiply)[(triton.cdiv(rows, _ROWS), columns // block, 2)](
        source,
        first,
        second,
        *outs,
        rows,
        columns=columns,
        depth=depth,
        block_rows=_ROWS,
        block_columns=block,
        block_depth=_DEPTH,
        num_warps=8 if block == _COLUMNS[-1] else 4,
        num_stages=_STAGES,
    )
    return outs[0], outs[1]


def _processors(device: torch.device) -> int:
    on_gpu = is_gpu(device)
    return torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1


def block_columns(rows: int, columns: int, processors: int) -> int:
    """Return the least columns of a block with which the blocks of both products run at once, one
    on each of the GPU's processors; else the most.
    """
    whole = [block for block in _COLUMNS if columns % block == 0]
    enough = [b for b in whole if 2 * triton.cdiv(rows, _ROWS) * (columns // b) <= processors]
    return min(enough, default=whole[-1])


OPERATOR = torch.ops.warmgraph.twin_product.default
