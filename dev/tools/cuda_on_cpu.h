// What our CUDA source needs of CUDA, on a processor; see cuda_on_cpu.py. The threads of a block
// take turns: each runs until it waits for others, at a shuffle for its warp and at a barrier for
// the block.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Blocks run one after another.
#define __shared__ static

struct uint2 { unsigned int x, y; };
struct uint4 { unsigned int x, y, z, w; };
inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
    return {x, y, z, w};
}

template <class To, class From> To with_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline unsigned int __float_as_uint(float value) { return with_bits<unsigned int>(value); }
inline float __uint_as_float(unsigned int bits) { return with_bits<float>(bits); }
inline unsigned int max(unsigned int a, unsigned int b) { return a < b ? b : a; }

// Each four bits of `which` name a byte of the two words, the first word's four first.
inline unsigned int __byte_perm(unsigned int first, unsigned int second, unsigned int which) {
    const uint64_t both = (uint64_t)second << 32 | first;
    unsigned int result = 0;
    for (int byte = 0; byte < 4; ++byte)
        result |= (both >> (8 * (which >> (4 * byte) & 7)) & 0xff) << (8 * byte);
    return result;
}

// Instructions by their names in PTX.
inline float flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? 0.0f : value; }
inline float ptx_cvt_f32_f16(unsigned short bits) { return (float)with_bits<_Float16>(bits); }
inline float ptx_ex2_approx_ftz_f32(float value) { return flushed(std::exp2(flushed(value))); }
inline float ptx_rcp_approx_ftz_f32(float value) { return flushed(1.0f / flushed(value)); }

struct Place { unsigned int x; };
Place threadIdx, blockIdx, blockDim;

namespace turns {

enum State { READY, AT_SHUFFLE, AT_BARRIER, DONE };
constexpr unsigned int WARP = 32;
constexpr size_t STACK = 1 << 16;

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    State state;
    // What it shows the others at shuffles, by turns in one of the two.
    unsigned int shown[2];
    int turn;
};

std::vector<Thread> threads;
ucontext_t scheduler;
void (*body)();

inline Thread& current() { return threads[threadIdx.x]; }

inline void wait(State state) {
    Thread& thread = current();
    thread.state = state;
    swapcontext(&thread.context, &scheduler);
}

inline void begin() {
    body();
    current().state = DONE;
}

inline void resume(unsigned int index) {
    threadIdx.x = index;
    threads[index].state = READY;
    swapcontext(&scheduler, &threads[index].context);
}

// Whether those from `first` on all are in a state.
inline bool all(State state, unsigned int first, unsigned int count) {
    for (unsigned int index = first; index < first + count; ++index)
        if (threads[index].state != state) return false;
    return true;
}

// Runs one block; false if its threads wait for each other in vain.
inline bool run_block() {
    const unsigned int count = threads.size();
    for (Thread& thread : threads) {
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = STACK;
        thread.context.uc_link = &scheduler;
        thread.turn = 0;
        thread.state = READY;
        makecontext(&thread.context, begin, 0);
    }
    for (unsigned int index = 0; index < count; ++index) resume(index);
    while (!all(DONE, 0, count)) {
        bool moved = false;
        for (unsigned int first = 0; first < count; first += WARP)
            if (all(AT_SHUFFLE, first, WARP)) {
                for (unsigned int lane = 0; lane < WARP; ++lane) resume(first + lane);
                moved = true;
            }
        if (!moved && all(AT_BARRIER, 0, count)) {
            for (unsigned int index = 0; index < count; ++index) resume(index);
            moved = true;
        }
        if (!moved) return false;
    }
    return true;
}

// Runs a kernel; 1 if threads of a block wait in vain.
inline int run(int block_count, int thread_count, void (*kernel)()) {
    body = kernel;
    blockDim.x = thread_count;
    threads.clear();
    threads.resize(thread_count);
    for (Thread& thread : threads) thread.stack.reset(new char[STACK]);
    for (int block = 0; block < block_count; ++block) {
        blockIdx.x = block;
        if (!run_block()) return 1;
    }
    return 0;
}

}  // namespace turns

inline void __syncthreads() { turns::wait(turns::AT_BARRIER); }

template <class T> T __shfl_xor_sync(unsigned int mask, T value, int apart) {
    const unsigned int here = threadIdx.x;
    turns::Thread& thread = turns::current();
    const int turn = thread.turn;
    thread.shown[turn] = with_bits<unsigned int>(value);
    thread.turn = 1 - turn;
    turns::wait(turns::AT_SHUFFLE);
    return with_bits<T>(turns::threads[here ^ apart].shown[turn]);
}
