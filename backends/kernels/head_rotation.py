"""Queries and keys normed by their heads and rotated, as one operator of a graph.

What a compiler writes for it reads its neighbours and the table element by element, and so waits
for its loads: 84 us for Z-Image's queries and keys at 1024x1024 on an H200, where this kernel takes
half. Each thread holds eight neighbours, and its part of the table for all heads of a token.

Where nothing compiles CUDA source the operator computes the same maths by PyTorch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..kinds import operators
from ..torch_api.cuda_source import Launch, compile_cuda

logger = logging.getLogger(__name__)

#: Elements that a thread holds; the threads of a head reduce among themselves.
_HELD = 8
_MOST_THREADS = 1024
_WIDTHS = (32, 64, 128, 256)
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

SOURCE = """
// Bits of a bfloat16 (kind 0) or float16 (1) as a float, and back, rounded to the nearest.
__device__ __forceinline__ float number(unsigned int bits, int kind) {
    float result;
    if (kind == 1) {
        unsigned short low = (unsigned short)bits;
        asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(low));
    } else {
        result = __uint_as_float(bits << 16);
    }
    return result;
}

__device__ __forceinline__ unsigned int rounded(float value, int kind) {
    if (kind == 1) {
        unsigned short low;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(low) : "f"(value));
        return low;
    }
    const unsigned int bits = __float_as_uint(value);
    if (value != value) return 0x7fffu;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

__device__ __forceinline__ float of_scale(const void* scale, int place, int kind) {
    if (kind == 2) return ((const float*)scale)[place];
    return number(((const unsigned short*)scale)[place], kind);
}

// One block a token, of its queries' heads and its keys'; strides in pieces of eight elements,
// those of the table in elements. All that a thread reads it asks for before it waits.
extern "C" __global__ void __launch_bounds__(1024) norm_and_rotate(
    const uint4* query, const uint4* key, const float* table, const void* query_scale,
    const void* key_scale, uint4* query_out, uint4* key_out, int query_batch, int query_row,
    int query_head, int key_batch, int key_row, int key_head, int table_batch, int table_row,
    int query_heads, int key_heads, int rows, int threads, int kind, int query_kind, int key_kind,
    int rounds, double epsilon
) {
    const long long row = blockIdx.x % rows, batch = blockIdx.x / rows;
    const long long token = batch * rows + row;
    const int lane = threadIdx.x % threads;
    const float4* places = (const float4*)(
        table + batch * table_batch + row * table_row + 16ll * lane);
    float4 t[4];
    #pragma unroll
    for (int pair = 0; pair < 4; ++pair) t[pair] = places[pair];
    // Heads at the end of a token leave the other half of a warp without any.
    const unsigned int all = threads == 32 ? 0xffffffffu : (1u << threads) - 1u;
    const unsigned int here = all << (threadIdx.x % 32 / threads * threads);

    const int step = blockDim.x / threads;
    for (int each = threadIdx.x / threads; each < query_heads + key_heads; each += step) {
        const bool is_key = each >= query_heads;
        const int head = is_key ? each - query_heads : each;
        const uint4 held = is_key
            ? key[batch * key_batch + row * key_row + (long long)head * key_head + lane]
            : query[batch * query_batch + row * query_row + (long long)head * query_head + lane];
        const void* scales = is_key ? key_scale : query_scale;
        const int scale_kind = is_key ? key_kind : query_kind;
        float scale[8], x[8];
        #pragma unroll
        for (int place = 0; place < 8; ++place)
            scale[place] = of_scale(scales, 8 * lane + place, scale_kind);
        const unsigned int words[4] = {held.x, held.y, held.z, held.w};
        float squares = 0.0f;
        #pragma unroll
        for (int word = 0; word < 4; ++word) {
            x[2 * word] = number(words[word] & 0xffffu, kind);
            x[2 * word + 1] = number(words[word] >> 16, kind);
        }
        #pragma unroll
        for (int place = 0; place < 8; ++place) squares += x[place] * x[place];
        for (int apart = threads / 2; apart > 0; apart /= 2)
            squares += __shfl_xor_sync(here, squares, apart);
        const float factor = rsqrtf(squares / (8 * threads) + (float)epsilon);
        unsigned int out[4];
        #pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            float even = x[2 * pair] * factor * scale[2 * pair];
            float odd = x[2 * pair + 1] * factor * scale[2 * pair + 1];
            if (rounds) {
                even = number(rounded(even, kind), kind);
                odd = number(rounded(odd, kind), kind);
            }
            const unsigned int low = rounded(t[pair].x * even + t[pair].y * odd, kind);
            const unsigned int high = rounded(t[pair].z * even + t[pair].w * odd, kind);
            out[pair] = low | (high << 16);
        }
        uint4* result = is_key ? key_out + token * key_heads * threads
                               : query_out + token * query_heads * threads;
        result[head * threads + lane] = make_uint4(out[0], out[1], out[2], out[3]);
    }
}
"""


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The host's rotation of neighbouring elements by a table `[..., width // 2, 2, 2]`, as maths
    that a compiler fuses with what comes before; the library's kernel is a pass over memory of its
    own, some 2 of the 93 ms of a step of Z-Image at 1024x1024 on an H200.
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
        query.is_cuda
        and torch.version.cuda is not None
        and query.dtype in (torch.bfloat16, torch.float16)
        and key.dtype is query.dtype
        and type(width) is int
        and width in _WIDTHS
        and key.shape[3] == width
        and table.dtype is torch.float32
        and tuple(table.shape[2:]) == (1, width // 2, 2, 2)
    )


class _Kernels:
    """The kernel on each device, compiled when first called there; None where it cannot be."""

    def __init__(self) -> None:
        self._launches: dict[torch.device, Launch | None] = {}

    def on(self, device: torch.device) -> Launch | None:
        if device not in self._launches:
            if torch.cuda.is_current_stream_capturing():  # no code can be loaded meanwhile
                return None
            try:
                self._launches[device] = compile_cuda(SOURCE, "norm_and_rotate")
            except RuntimeError as error:
                logger.debug("queries and keys are rotated by PyTorch: %s", error)
                self._launches[device] = None
        return self._launches[device]


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor,
    query_scale: torch.Tensor,
    key_scale: torch.Tensor,
    epsilon: float,
    rounds: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    launch = _kernels.on(query.device) if query.is_cuda else None
    if launch is None or not _fits(query, key, table, query_scale, key_scale):
        return tuple(  # type: ignore[return-value]
            _plain(x, table, scale, epsilon, rounds=rounds).contiguous()
            for x, scale in ((query, query_scale), (key, key_scale))
        )
    batch, rows, heads, width = query.shape
    found = query.new_empty(query.shape), key.new_empty(key.shape)
    strides = [n // _HELD for x in (query, key) for n in x.stride()[:3]]
    of_table = [0 if table.shape[dim] == 1 else table.stride(dim) for dim in (0, 1)]
    kinds = [_KINDS[x.dtype] for x in (query, query_scale, key_scale)]
    tensors = (query, key, table, query_scale, key_scale, *found)
    numbers = (*strides, *of_table, heads, key.shape[2], rows, width // _HELD, *kinds, int(rounds))
    wanted = (heads + key.shape[2]) * width // _HELD
    turns = -(-wanted // _MOST_THREADS)
    threads = -(-wanted // (32 * turns)) * 32
    launch(batch * rows, threads, (*tensors, *numbers, epsilon))
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
    """Whether the kernel reads these as they lie in memory."""
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
        and all(x.is_contiguous() and x.dtype in _KINDS for x in (query_scale, key_scale))
    )


def _fake(query: torch.Tensor, key: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


#: Of queries and keys as `is_for` has them, and two scales `[width]`; returns both contiguous.
#: `rounds`: what is normed is rounded to their dtype before it is rotated.
OPERATOR, _kernels = operators.register(
    "norm_and_rotate(Tensor query, Tensor key, Tensor table, Tensor query_scale, Tensor key_scale,"
    " float epsilon, bool rounds) -> (Tensor, Tensor)",
    _run,
    _fake,
    _Kernels(),
)
