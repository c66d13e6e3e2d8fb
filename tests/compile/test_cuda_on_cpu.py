"""CUDA source that a processor runs: threads that wait for each other as on a GPU."""

from __future__ import annotations

import pytest
import torch

from warmgraph_tools.cuda_on_cpu import compile_cuda

REVERSED = """
extern "C" __global__ void __launch_bounds__(1024) reversed(
    const unsigned int* given, unsigned int* found, int add
) {
    __shared__ unsigned int held[64];
    const unsigned int whole = __shfl_xor_sync(0xffffffffu, given[threadIdx.x], 31);
    held[threadIdx.x] = whole;
    __syncthreads();
    // Of the other warp, which has written by now.
    found[blockIdx.x * blockDim.x + threadIdx.x] = held[threadIdx.x ^ 32] + add;
}
"""
DIVERGENT = """
extern "C" __global__ void divergent(unsigned int* found) {
    if (threadIdx.x != 5) found[threadIdx.x] = __shfl_xor_sync(0xffffffffu, found[threadIdx.x], 1);
}
"""
ALONE = """
extern "C" __global__ void alone(unsigned int* found) {
    if (threadIdx.x < 32) __syncthreads();
}
"""


def test_warps_exchange_and_blocks_wait() -> None:
    given, found = torch.arange(64, dtype=torch.int32), torch.empty(2, 64, dtype=torch.int32)
    compile_cuda(REVERSED, "reversed")(2, 64, (given, found, 1000))
    assert torch.equal(found, (given.flip(0) + 1000).expand(2, 64))


@pytest.mark.parametrize("source, name", [(DIVERGENT, "divergent"), (ALONE, "alone")])
def test_threads_that_do_not_come_are_told(source: str, name: str) -> None:
    with pytest.raises(RuntimeError, match=f"threads of {name} wait for others"):
        compile_cuda(source, name)(1, 64, (torch.zeros(64, dtype=torch.int32),))


def test_what_the_compiler_refuses_is_told() -> None:
    wrong = 'extern "C" __global__ void wrong(int* found) { nothing; }'
    with pytest.raises(RuntimeError, match=r"(?s)refuses wrong: .*nothing"):
        compile_cuda(wrong, "wrong")
    with pytest.raises(RuntimeError, match="there is no"):
        compile_cuda(wrong, "another")
    with pytest.raises(RuntimeError, match="whole warps"):
        compile_cuda(REVERSED, "reversed")(1, 40, (torch.zeros(1), torch.zeros(1), 0))
