"""Attention over few keys, such as the 77 tokens of a text, in one Triton kernel.

Flash attention is made for as many keys as rows: over a text it spends most of its time filling
and draining its pipeline. Here every block of rows reads the few keys once and is done. The kernel
becomes part of the graph that calls it: only who builds a graph imports this module, and Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

#: Quickest of rows in 32-128, keys in 32-128 and 2-8 warps over SDXL's and SD1.5's shapes (H200).
_ROWS = 64
_KEYS = 64
_LOG2_E = 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    out,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    heads,
    rows,
    key_rows: tl.constexpr,
    width: tl.constexpr,
    scale: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    block_width: tl.constexpr,
):
    """One block of rows of one head; strides in elements, `scale` for powers of two."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block_width)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    query = tl.load(
        queries
        + batch * query_batch
        + head * query_head
        + row[:, None] * query_row
        + column[None, :],
        mask=inside,
        other=0.0,
    )
    keys += batch * key_batch + head * key_head
    values += batch * value_batch + head * value_head
    highest = tl.full([block_rows], float("-inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    sums = tl.zeros([block_rows, block_width], tl.float32)
    for start in tl.static_range(0, key_rows, block_keys):
        place = start + tl.arange(0, block_keys)
        there = (place[:, None] < key_rows) & (column[None, :] < width)
        key = tl.load(keys + place[:, None] * key_row + column[None, :], mask=there, other=0.0)
        value = tl.load(
            values + place[:, None] * value_row + column[None, :], mask=there, other=0.0
        )
        scores = tl.dot(query, tl.trans(key)) * scale
        scores = tl.where(place[None, :] < key_rows, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(shares, 1)
        sums = tl.dot(shares.to(value.dtype), value, sums * shrink[:, None])
        highest = higher
    # [batch, row, head, width] in memory, as flash attention leaves it: heads join without a copy.
    place = ((batch * rows + row[:, None]) * heads + head) * width + column[None, :]
    tl.store(out + place, (sums / total[:, None]).to(query.dtype), mask=inside)


@triton_op("warmgraph::cross_attention", mutates_args={})
def cross_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Softmax of scaled products, without a mask.

    Args:
        query: [batch, heads, rows, width] in float16 or bfloat16, widths adjacent in memory.
        key: [batch, heads, keys, width], likewise.
        value: as `key`.

    Returns:
        [batch, heads, rows, width], stored with the heads of a row side by side.
    """
    batch, heads, rows, width = query.shape
    out = query.new_empty(batch, rows, heads, width).transpose(1, 2)
    wrap_triton(_attend)[(triton.cdiv(rows, _ROWS), batch * heads)](
        query,
        key,
        value,
        out,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        heads,
        rows,
        key_rows=key.shape[2],
        width=width,
        scale=width**-0.5 * _LOG2_E,
        block_rows=_ROWS,
        block_keys=_KEYS,
        block_width=max(16, triton.next_power_of_2(width)),
    )
    return out


OPERATOR = torch.ops.warmgraph.cross_attention.default
