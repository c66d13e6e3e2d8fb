"""Weights in blocks: every format to its last bit, and compiled as well."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from warmgraph_backends.families import packed_weight
from warmgraph_backends.host_api import gguf
from warmgraph_backends.kernels import packed_blocks
from warmgraph_backends.kernels.packed_blocks import FORMATS, Packed, unpack
from warmgraph_backends.weights.streamed import made_of, parts_and_rest, parts_of
from warmgraph_tools import gguf_files

#: What the package `gguf` 0.19.0 makes of the same bytes (`quants.dequantize`): how many of 200
#: blocks are finite, and a hash of these.
DIGESTS = {
    "Q4_0": (197, "fa856f25bf9fe50c"),
    "Q4_1": (193, "f2094a7bde8ae0e2"),
    "Q5_0": (194, "51c02e1a4502576f"),
    "Q5_1": (189, "90ed86b14eacee74"),
    "Q8_0": (193, "12339cb512c1a206"),
    "Q2_K": (189, "6e637c03abfb668c"),
    "Q3_K": (194, "0e55990b2a4cf4e8"),
    "Q4_K": (186, "500edecef09514c8"),
    "Q5_K": (189, "6c310a43b987d97f"),
    "Q6_K": (194, "ff3949647593be94"),
}
STEPS = (torch.float16, torch.bfloat16, torch.float32)


def blocks_of(name: str, count: int = 200) -> torch.Tensor:
    """Bytes that are as good as any."""
    size = FORMATS[name].size
    made = hashlib.shake_256(name.encode()).digest(count * size)
    return torch.frombuffer(bytearray(made), dtype=torch.uint8).reshape(count, size)


def finite(name: str, steps: torch.dtype) -> torch.Tensor:
    """Blocks whose numbers are all finite."""
    blocks = blocks_of(name)
    found = unpack(blocks, FORMATS[name], steps, torch.float32)
    return blocks[found.isfinite().all(1)]


@pytest.mark.parametrize("name", DIGESTS)
def test_numbers_are_those_of_the_formats_own_package(name: str) -> None:
    blocks = finite(name, torch.float32)
    found = unpack(blocks, FORMATS[name], torch.float32, torch.float32) + 0.0  # no -0
    digest = hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16]
    assert (len(blocks), digest) == DIGESTS[name]


def test_all_formats_that_files_have_are_known_and_compiled() -> None:
    assert set(gguf.FORMATS.values()) == FORMATS.keys()
    packed = {name for name, form in FORMATS.items() if form.is_packed}
    assert packed == DIGESTS.keys()
    assert {name.split()[0] for name in packed_weight.FORMS} == packed
    assert len(packed_weight.FORMS) == len(packed) * 9


@pytest.mark.parametrize(("name", "most"), [("Q8_0", 0.01), ("Q4_K", 0.1)])
def test_what_is_packed_comes_back(name: str, most: float) -> None:
    weight = torch.randn(16, 512, generator=torch.Generator().manual_seed(1))
    weight[3] = 0.0
    blocks = gguf_files.FORMATS[name](weight).reshape(-1, FORMATS[name].size)
    found = unpack(blocks, FORMATS[name], torch.float32, torch.float32).reshape(weight.shape)
    assert float((found - weight).norm() / weight.norm()) < most and not found[3].any()


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_each_step_is_rounded(name: str, steps: torch.dtype) -> None:
    blocks = finite(name, steps)
    found = unpack(blocks, FORMATS[name], steps, torch.float32)
    assert torch.equal(found, found.to(steps).float())
    exact = unpack(blocks, FORMATS[name], torch.float32, torch.float32)
    assert torch.equal(found, exact) == (steps is torch.float32)
    assert torch.allclose(found, exact, rtol=0.2, atol=float(exact.abs().max()) / 50)


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("BF16", torch.bfloat16)])
def test_numbers_that_are_not_packed_are_converted(name: str, dtype: torch.dtype) -> None:
    values = torch.linspace(-3, 3, 64).to(dtype)
    blocks = values.view(torch.uint8).reshape(-1, FORMATS[name].size)
    weight = Packed(blocks, FORMATS[name], torch.float16, torch.Size((8, 8)), torch.float16)
    assert torch.equal(weight.unpacked(), values.to(torch.float16).reshape(8, 8))


def test_a_packed_weight_stands_where_a_tensor_is_multiplied_by() -> None:
    blocks = finite("Q8_0", torch.float16)[:16]
    weight = Packed(blocks, FORMATS["Q8_0"], torch.float16, torch.Size((8, 64)), torch.float16)
    x, bias = torch.randn(3, 64).to(torch.float16), torch.randn(8)
    found = torch.nn.functional.linear(x, weight, bias)  # type: ignore[arg-type]
    plain = torch.nn.functional.linear(x, weight.unpacked(), bias.to(torch.float16))
    assert torch.equal(found, plain)
    without = torch.nn.functional.linear(x, weight)  # type: ignore[arg-type]
    assert torch.equal(without, torch.nn.functional.linear(x, weight.unpacked()))
    with pytest.raises(TypeError):
        torch.add(x, weight)  # type: ignore[call-overload]


def test_a_large_one_is_unpacked_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = finite("Q5_0", torch.float16)[:24]
    weight = Packed(blocks, FORMATS["Q5_0"], torch.float16, torch.Size((12, 64)), torch.float16)
    whole = weight.unpacked()
    monkeypatch.setattr(packed_blocks, "_AT_ONCE", 5 * 32)
    assert torch.equal(weight.unpacked(), whole)


def test_it_is_copied_and_told_apart_by_its_parts() -> None:
    blocks = finite("Q4_0", torch.float16)[:8]
    weight = Packed(blocks, FORMATS["Q4_0"], torch.float16, torch.Size((4, 64)), torch.float16)
    [mine] = parts_of(weight) or []
    copy = made_of(weight, iter([blocks.clone()]))
    [its] = parts_of(copy) or []
    assert mine is blocks and torch.equal(its, blocks) and its.data_ptr() != blocks.data_ptr()
    assert _rest_of(copy) == _rest_of(weight) and torch.equal(copy.unpacked(), weight.unpacked())
    other = Packed(blocks, FORMATS["Q4_0"], torch.float32, torch.Size((4, 64)), torch.float16)
    assert _rest_of(other) != _rest_of(weight)


def _rest_of(weight: Packed) -> Any:
    apart = parts_and_rest(weight)
    assert apart is not None
    return apart[1]
