"""Queries and keys normed by their heads and rotated, as one operator of a graph.

A compiler's code for it reads neighbours and the table element by element, and so waits for its
loads: 84 us for Z-Image's queries and keys at 1024x1024 on an H200, where this kernel takes half.
Each thread holds eight neighbours, and its part of the table for all heads of a token.

Without a compiler for CUDA source PyTorch computes the same maths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..device.gpu import is_capturing, kind_of
from ..torch_api.cuda_source import Launch, compile_or_warn
from . import registering

#: Elements that a thread holds; the threads of a head reduce among themselves.
_HELD = 8
_THREADS = 256
#: What the kernel does, in words.
WHAT = "rotating queries and keys"
_WIDTHS = (32, 64, 128, 256)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The host's rotation of neighbouring elements by a table `[..., width // 2, 2, 2]`, as maths
    that a compiler fuses with what comes before; the library's kernel is a separate pass over
    memory, some 2 of the 93 ms of a step of Z-Image at 1024x1024 on an H200.
    """
    exact = torch.promote_types(table.dtype, torch.float32)
    pairs = x.to(exact).reshape(*x.shape[:-1], -1, 1, 2)
    table = table.to(exact)
    rotated: torch.Tensor = table[..., 0] * pairs[..., 0] + table[..., 1] * pairs[..., 1]
    return rotated.reshape(x.shape).to(x.dtype)


def norm(x: torch.Tensor, scale: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The host's root-mean-square norm of each row, not rounded."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    factor = torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)
    return exact * factor * scale.to(exact.dtype)


def is_for(query: torch.Tensor, key: torch.Tensor, table: torch.Tensor) -> bool:
    """Tell whether a graph should call the operator for tensors such as these.

    Args:
        query, key: [batch, rows, heads, width].
        table: [batch or 1, rows, 1, width // 2, 2, 2].
    """
    width = query.shape[3]
    return (
        kind_of(query.device).has_nvrtc
        and query.dtype in (torch.bfloat16, torch.float16)
        and key.dtype is query.dtype
        and type(width) is int
        and width in _WIDTHS
        and key.shape[3] == width
        and table.dtype is torch.float32
        and tuple(table.shape[2:]) == (1, width // 2, 2, 2)
    )


class _Kernels:
    """The kernel of each device and dtype, compiled at its first call; None if it cannot be."""

    def __init__(self) -> None:
        self._launches: dict[tuple[torch.device, torch.dtype], Launch | None] = {}

    def of(self, like: torch.Tensor) -> Launch | None:
        form = like.device, like.dtype
        if form not in self._launches:
            if is_capturing(like.device):  # no code can be loaded within a capture
                return None
            source = source_for(like.dtype)
            self._launches[form] = compile_or_warn(source, "norm_and_rotate", WHAT, like.device)
        return self._launches[form]


def source_for(dtype: torch.dtype) -> str:
    """Return the kernel's source for queries of float16 or bfloat16."""
    code = Path(__file__).with_suffix(".cu").read_text("utf-8")
    return f"#define HALF {int(dtype is torch.float16)}\n{code}"


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor,
    query_scale: torch.Tensor,
    key_scale: torch.Tensor,
    epsilon: float,
    rounds: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    launch = _kernels.of(query) if query.is_cuda else None
    if launch is None or not _fits(query, key, table, query_scale, key_scale):
        return tuple(  # type: ignore[return-value]
            _plain(x, table, scale, epsilon, rounds=rounds).contiguous()
            for x, scale in ((query, query_scale), (key, key_scale))
        )
    batch, rows, heads, width = query.shape
    found = query.new_empty(query.shape), key.new_empty(key.shape)
    strides = [n // _HELD for x in (query, key) for n in x.stride()[:3]]
    of_table = [0 if table.shape[dim] == 1 else table.stride(dim) for dim in (0, 1)]
    floats = [int(scale.dtype is torch.float32) for scale in (query_scale, key_scale)]
    tensors = (query, key, table, query_scale, key_scale, *found)
    numbers = (*strides, *of_table, heads, key.shape[2], rows, width // _HELD, *floats, int(rounds))
    launch(batch * rows, _THREADS, (*tensors, *numbers, epsilon))
    return found


def _plain(
    x: torch.Tensor, table: torch.Tensor, scale: torch.Tensor, epsilon: float, *, rounds: bool
) -> torch.Tensor:
    normed = norm(x, scale, epsilon)
    return rotate(normed.to(x.dtype) if rounds else normed, table).to(x.dtype)


def _fits(
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor,
    query_scale: torch.Tensor,
    key_scale: torch.Tensor,
) -> bool:
    """Whether the kernel can read these in their layout."""
    pieces = all(
        x.data_ptr() % 16 == 0
        and x.stride(3) == 1
        and all(n % _HELD == 0 and n < 2**31 for n in x.stride()[:3])
        for x in (query, key)
    )
    return (
        pieces
        and is_for(query, key, table)
        and table[0, 0].is_contiguous()
        and table.data_ptr() % 16 == 0
        and all(n % 4 == 0 and n < 2**31 for n in table.stride()[:2])
        and table.shape[0] in (1, query.shape[0])
        and table.shape[1] in (1, query.shape[1])
        and key.shape[:2] == query.shape[:2]
        and 0 < query.shape[0] * query.shape[1] < 2**31
        and all(
            x.is_contiguous() and x.data_ptr() % 16 == 0 and x.dtype in (query.dtype, torch.float32)
            for x in (query_scale, key_scale)
        )
    )


def _fake(query: torch.Tensor, key: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


#: Of queries and keys as `is_for` has them, and two scales `[width]`; returns both contiguous.
#: `rounds`: what is normed is rounded to their dtype before it is rotated.
OPERATOR, _kernels = registering.register(
    "norm_and_rotate(Tensor query, Tensor key, Tensor table, Tensor query_scale, Tensor key_scale,"
    " float epsilon, bool rounds) -> (Tensor, Tensor)",
    _run,
    _fake,
    _Kernels(),
)
