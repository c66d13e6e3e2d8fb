// Queries and keys normed by their heads and rotated; see head_rotation.py, which defines HALF.

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
