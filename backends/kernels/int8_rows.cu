// Rows of float16 or bfloat16 as int8; see int8_rows.py, which defines
//   HALF: of float16 if it is 1, else of bfloat16;
//   ACTIVATION: what is done to them first, one of those below;
//   ROTATED: 1 if groups of 256 are rotated then, by the regular Hadamard matrix;
//   PLACES: so many pieces of eight elements a thread holds, four where they are rotated.
#define NONE 0
#define GELU_TANH 1
#define SWIGLU 2

// Halves of a row that make one: a gate, and what passes it.
#define PARTS (ACTIVATION == SWIGLU ? 2 : 1)
// What a rotated number is to be multiplied by for the matrix to be orthogonal.
#define NORM (ROTATED ? 0.0625f : 1.0f)
// Added to a float of up to 2^22 it leaves the nearest integer, in the lowest bits of the sum.
#define ROUNDS 12582912.0f
#define LOG2_E 1.4426950408889634f
// Twice sqrt(2 / pi): tanh(t) is 2 logistic(2 t) - 1.
#define GELU_SLOPE (LOG2_E * 1.5957691216057308f)

// The bits of a float16 or bfloat16 as a float.
__device__ __forceinline__ float number(unsigned int bits) {
#if HALF
    float result;
    unsigned short low = (unsigned short)bits;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(low));
    return result;
#else
    return __uint_as_float(bits << 16);
#endif
}

__device__ __forceinline__ void numbers(uint4 held, float* out) {
    const unsigned int words[4] = {held.x, held.y, held.z, held.w};
    #pragma unroll
    for (int word = 0; word < 4; ++word) {
        out[2 * word] = number(words[word] & 0xffffu);
        out[2 * word + 1] = number(words[word] >> 16);
    }
}

// value / (1 + 2^power), right to some 2^-21. Of an infinite power it is 0 or the value.
__device__ __forceinline__ float over_one_and(float value, float power) {
    float two, part;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(two) : "f"(power));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(part) : "f"(1.0f + two));
    return value * part;
}

__device__ __forceinline__ float activated(float value, float other) {
#if ACTIVATION == GELU_TANH
    const float slope = -GELU_SLOPE - GELU_SLOPE * 0.044715f * value * value;
    return over_one_and(value, value * slope);
#elif ACTIVATION == SWIGLU
    return over_one_and(value, -LOG2_E * value) * other;
#else
    return value;
#endif
}

// Which piece of a row a thread holds at a place. Of a rotated group eight neighbouring threads
// hold all 32. The bits of a piece, from the last on: thread, thread, place, thread, place.
__device__ __forceinline__ int piece_at(int place) {
#if ROTATED
    const int thread = threadIdx.x, begin = thread / 8 * 32;
    return begin + (thread & 3) + (place & 1) * 4 + (thread & 4) * 2 + (place & 2) * 8;
#else
    return threadIdx.x + place * blockDim.x;
#endif
}

// One step of the rotation: of four numbers, y[i] = x[0] + x[1] + x[2] + x[3] - 2 x[3 - i].
__device__ __forceinline__ void rotate_within(float* x) {
    const float sum = (x[0] + x[3]) + (x[1] + x[2]);
    const float third = x[2], last = x[3];
    x[3] = fmaf(-2.0f, x[0], sum);
    x[2] = fmaf(-2.0f, x[1], sum);
    x[1] = fmaf(-2.0f, third, sum);
    x[0] = fmaf(-2.0f, last, sum);
}

// The same where a thread has two of the four, and the thread that is `apart` the other two.
__device__ __forceinline__ void rotate_across(float& first, float& second, int apart) {
    const float sum = first + second;
    const float difference = __shfl_xor_sync(0xffffffffu, first - second, apart);
    first = sum + difference;
    second = sum - difference;
}

// A group's matrix is a product of four steps: by bits 0 and 1 of an element's number in its group,
// by 2 and 3, and so on. Of each two bits one at least is within the thread.
__device__ __forceinline__ void rotate(float (*x)[8]) {
    #pragma unroll
    for (int place = 0; place < PLACES; ++place) {
        rotate_within(x[place]);
        rotate_within(x[place] + 4);
        #pragma unroll
        for (int each = 0; each < 4; ++each) rotate_across(x[place][each], x[place][each + 4], 1);
    }
    #pragma unroll
    for (int each = 0; each < 8; ++each) {
        rotate_across(x[0][each], x[1][each], 2);
        rotate_across(x[2][each], x[3][each], 2);
        rotate_across(x[0][each], x[2][each], 4);
        rotate_across(x[1][each], x[3][each], 4);
    }
}

// The lowest bytes of four words.
__device__ __forceinline__ unsigned int packed(const unsigned int* words) {
    const unsigned int low = __byte_perm(words[0], words[1], 0x0040);
    return __byte_perm(low, __byte_perm(words[2], words[3], 0x0040), 0x5410);
}

// One block a row, which becomes `pieces` times eight elements.
extern "C" __global__ void __launch_bounds__(1024) quantise_rows(
    const uint4* rows, uint2* values, float* scales, int pieces
) {
    __shared__ unsigned int of_warps[32];
    const long long begin = (long long)blockIdx.x * pieces;
    uint4 held[PARTS][PLACES];
    #pragma unroll
    for (int part = 0; part < PARTS; ++part)
        #pragma unroll
        for (int place = 0; place < PLACES; ++place) {
            const int piece = piece_at(place);
            held[part][place] = make_uint4(0, 0, 0, 0);
            if (piece < pieces) held[part][place] = rows[PARTS * begin + part * pieces + piece];
        }
    float x[PLACES][8];
    #pragma unroll
    for (int place = 0; place < PLACES; ++place) {
        float other[8];
        numbers(held[0][place], x[place]);
        numbers(held[PARTS - 1][place], other);
        #pragma unroll
        for (int each = 0; each < 8; ++each)
            x[place][each] = activated(x[place][each], other[each]);
    }
#if ROTATED
    rotate(x);
#endif

    // Of absolute floats, bits compare as numbers do, and those of NaN are the largest.
    unsigned int largest = 0;
    #pragma unroll
    for (int place = 0; place < PLACES; ++place)
        #pragma unroll
        for (int each = 0; each < 8; ++each)
            largest = max(largest, __float_as_uint(fabsf(x[place][each])));
    for (int apart = 16; apart > 0; apart /= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    largest = threadIdx.x % 32 < blockDim.x / 32 ? of_warps[threadIdx.x % 32] : 0;
    for (int apart = 16; apart > 0; apart /= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, apart));

    const float highest = NORM * __uint_as_float(largest);
    const float scale = highest < 127e-30f ? 1e-30f : highest / 127.0f;
    const float inverse = NORM / scale;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    #pragma unroll
    for (int place = 0; place < PLACES; ++place) {
        unsigned int words[8];
        #pragma unroll
        for (int each = 0; each < 8; ++each)
            words[each] = __float_as_uint(fmaf(x[place][each], inverse, ROUNDS));
        const int piece = piece_at(place);
        if (piece < pieces) values[begin + piece] = make_uint2(packed(words), packed(words + 4));
    }
}
