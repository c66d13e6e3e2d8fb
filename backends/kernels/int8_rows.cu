// Rows of float16 or bfloat16 as int8; see int8_rows.py, which defines TIMES.

// The bits of a float16 (half) or bfloat16 as a float.
__device__ __forceinline__ float number(unsigned int bits, int half) {
    float result;
    if (half) {
        unsigned short low = (unsigned short)bits;
        asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(low));
    } else {
        result = __uint_as_float(bits << 16);
    }
    return result;
}

__device__ __forceinline__ void numbers(uint4 held, int half, float* out) {
    const unsigned int words[4] = {held.x, held.y, held.z, held.w};
    #pragma unroll
    for (int word = 0; word < 4; ++word) {
        out[2 * word] = number(words[word] & 0xffffu, half);
        out[2 * word + 1] = number(words[word] >> 16, half);
    }
}

// One block a row of `pieces` times eight elements, at most TIMES pieces a thread.
extern "C" __global__ void quantise_rows(
    const uint4* rows, uint2* values, float* scales, int pieces, int half
) {
    __shared__ unsigned int of_warps[32];
    const long long begin = (long long)blockIdx.x * pieces;
    uint4 held[TIMES];
    // Of absolute floats, bits compare as numbers do, and those of NaN are the largest.
    unsigned int largest = 0;
    #pragma unroll
    for (int time = 0; time < TIMES; ++time) {
        const int piece = threadIdx.x + time * blockDim.x;
        held[time] = piece < pieces ? rows[begin + piece] : make_uint4(0, 0, 0, 0);
    }
    #pragma unroll
    for (int time = 0; time < TIMES; ++time) {
        float found[8];
        numbers(held[time], half, found);
        #pragma unroll
        for (int each = 0; each < 8; ++each)
            largest = max(largest, __float_as_uint(fabsf(found[each])));
    }
    for (int apart = 16; apart > 0; apart /= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    largest = threadIdx.x % 32 < blockDim.x / 32 ? of_warps[threadIdx.x % 32] : 0;
    for (int apart = 16; apart > 0; apart /= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, apart));

    const float highest = __uint_as_float(largest);
    const float scale = highest < 127e-30f ? 1e-30f : highest / 127.0f;
    const float inverse = 1.0f / scale;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    #pragma unroll
    for (int time = 0; time < TIMES; ++time) {
        const int piece = threadIdx.x + time * blockDim.x;
        if (piece >= pieces) continue;
        float found[8];
        numbers(held[time], half, found);
        unsigned int words[2] = {0, 0};
        #pragma unroll
        for (int each = 0; each < 8; ++each) {
            const int rounded = max(-127, min(127, __float2int_rn(found[each] * inverse)));
            words[each / 4] |= ((unsigned int)rounded & 0xffu) << (8 * (each % 4));
        }
        values[begin + piece] = make_uint2(words[0], words[1]);
    }
}
