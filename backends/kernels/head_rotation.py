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
_THREADS = 256
_WIDTHS = (32, 64, 128, 256)

SOURCE = """
// Two numbers of HALF (float16 if it is 1, else bfloat16) in a word, the first one below.
__device__ __forceinline__ float2 numbers(unsigned int word) {
    float2 result;
#if HALF
    unsigned short low = (unsigned short)word, high = (unsigned short)(word >> 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(result.x) : "h"(low));
    asm("cvt.f32.f16 %0, %1;" : "=f"(result.y) : "h"(high));
#else
    result.x = __uint_as_float(word << 16);
    result.y = __uint_as_float(word & 0xffff0000u);
#endif
    return result;
}

__device__ __forceinline__ unsigned int rounded(float value) {
#if HALF
    unsigned short low;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(low) : "f"(value));
    return low;
#else
    if (value != value) return 0x7fffu;
    const unsigned int bits = __float_as_uint(value);
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
#endif
}

__device__ __forceinline__ unsigned int word_of(float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned int word;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
#else
    return rounded(low) | (rounded(high) << 16);
#endif
}

// One block a token, of its queries' heads and its keys'; strides in pieces of eight elements,
// those of the table in elements. What a thread needs next it asks for before it computes.
extern "C" __global__ void __launch_bounds__(256, 4) norm_and_rotate(
    const uint4* query, const uint4* key, const float* table, const void* query_scale,
    const void* key_scale, uint4* query_out, uint4* key_out, int query_batch, int query_row,
    int query_head, int key_batch, int key_row, int key_head, int table_batch, int table_row,
    int query_heads, int key_heads, int rows, int threads, int query_float, int key_float,
    int rounds, double epsilon
) {
    const int row = blockIdx.x % rows, batch = blockIdx.x / rows;
    const long long token = blockIdx.x;
    const int lane = threadIdx.x % threads, first = threadIdx.x / threads;
    const int heads = query_heads + key_heads, step = blockDim.x / threads;
    query += (long long)batch * query_batch + (long long)row * query_row + lane;
    key += (long long)batch * key_batch + (long long)row * key_row + lane;
    query_out += token * query_heads * threads + lane;
    key_out += token * key_heads * threads + lane;
    const float4* places = (const float4*)(
        table + (long long)batch * table_batch + (long long)row * table_row + 16ll * lane);
    uint4 next = make_uint4(0, 0, 0, 0);
    if (first < heads)
        next = first < query_heads ? query[(long long)first * query_head]
                                   : key[(long long)(first - query_heads) * key_head];
    float4 t[4];
    #pragma unroll
    for (int pair = 0; pair < 4; ++pair) t[pair] = places[pair];
    // Heads at the end of a token leave the other half of a warp without any.
    const unsigned int all = threads == 32 ? 0xffffffffu : (1u << threads) - 1u;
    const unsigned int here = all << (threadIdx.x % 32 / threads * threads);

    for (int each = first; each < heads; each += step) {
        const uint4 held = next;
        const int after = each + step;
        if (after < heads)
            next = after < query_heads ? query[(long long)after * query_head]
                                       : key[(long long)(after - query_heads) * key_head];
        const bool is_key = each >= query_heads;
        const void* scales = is_key ? key_scale : query_scale;
        float2 scale[4];
        if (is_key ? key_float : query_float) {
            const float4* floats = (const float4*)scales + 2 * lane;
            const float4 low = floats[0], high = floats[1];
            scale[0] = make_float2(low.x, low.y);
            scale[1] = make_float2(low.z, low.w);
            scale[2] = make_float2(high.x, high.y);
            scale[3] = make_float2(high.z, high.w);
        } else {
            const uint4 words = ((const uint4*)scales)[lane];
            scale[0] = numbers(words.x);
            scale[1] = numbers(words.y);
            scale[2] = numbers(words.z);
            scale[3] = numbers(words.w);
        }
        float2 x[4] = {numbers(held.x), numbers(held.y), numbers(held.z), numbers(held.w)};
        float squares = 0.0f;
        #pragma unroll
        for (int pair = 0; pair < 4; ++pair)
            squares += x[pair].x * x[pair].x + x[pair].y * x[pair].y;
        for (int apart = threads / 2; apart > 0; apart /= 2)
            squares += __shfl_xor_sync(here, squares, apart);
        const float factor = rsqrtf(squares / (8 * threads) + (float)epsilon);
        unsigned int out[4];
        #pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            float even = x[pair].x * factor * scale[pair].x;
            float odd = x[pair].y * factor * scale[pair].y;
            if (rounds) {
                const float2 both = numbers(word_of(even, odd));
                even = both.x;
                odd = both.y;
            }
            out[pair] = word_of(t[pair].x * even + t[pair].y * odd,
                                t[pair].z * even + t[pair].w * odd);
        }
        const uint4 result = make_uint4(out[0], out[1], out[2], out[3]);
        if (is_key) key_out[(each - query_heads) * threads] = result;
        else query_out[each * threads] = result;
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
    """The kernel of each device and dtype, compiled when it is first called; None where it cannot
    be.
    """

    def __init__(self) -> None:
        self._launches: dict[tuple[torch.device, torch.dtype], Launch | None] = {}

    def of(self, like: torch.Tensor) -> Launch | None:
        form = like.device, like.dtype
        if form not in self._launches:
            if torch.cuda.is_current_stream_capturing():  # no code can be loaded meanwhile
                return None
            try:
                self._launches[form] = compile_cuda(source_for(like.dtype), "norm_and_rotate")
            except RuntimeError as error:
                logger.debug("queries and keys are rotated by PyTorch: %s", error)
                self._launches[form] = None
        return self._launches[form]


def source_for(dtype: torch.dtype) -> str:
    """Return the kernel's source for queries of float16 or bfloat16."""
    return f"#define HALF {int(dtype is torch.float16)}\n{SOURCE}"


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
        and all(
            x.is_contiguous() and x.data_ptr() % 16 == 0 and x.dtype in (query.dtype, torch.float32)
            for x in (query_scale, key_scale)
        )
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
