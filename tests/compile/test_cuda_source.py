"""CUDA source of ours compiles for every card that the host's products run on, without one."""

from __future__ import annotations

import itertools

import pytest
import torch

from warmgraph_backends.kernels import int8_rows
from warmgraph_backends.kernels.int8_rows import ACTIVATIONS, Sort
from warmgraph_backends.operators import head_rotation
from warmgraph_backends.torch_api.cuda_source import compile_binary

DTYPES = (torch.float16, torch.bfloat16)
SORTS = itertools.starmap(Sort, itertools.product(DTYPES, ACTIVATIONS, (False, True)))
SOURCES = {
    "quantise_rows": tuple(map(int8_rows.source, SORTS)),
    "norm_and_rotate": tuple(map(head_rotation.source_for, DTYPES)),
}


@pytest.fixture(autouse=True)
def compiler() -> None:
    if torch.version.cuda is None:
        pytest.skip("needs a PyTorch that brings NVRTC")


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("name", SOURCES)
def test_it_compiles_without_a_toolkit(
    name: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    for source in SOURCES[name]:
        assert name.encode() in compile_binary(source, name, architecture)


def test_what_it_refuses_is_told() -> None:
    with pytest.raises(RuntimeError, match=r'wrong for sm_90: .*"nothing" is undefined'):
        compile_binary('extern "C" __global__ void wrong() { nothing; }', "wrong", "sm_90")
    with pytest.raises(RuntimeError, match="sm_1"):
        compile_binary('extern "C" __global__ void wrong() {}', "wrong", "sm_1")
