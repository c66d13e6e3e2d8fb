"""Products by rotated int8 weights on a real GPU: right and timed in both ways, and captured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.choices import int8_products, ways
from warmgraph_backends.choices.int8_products import FILE_NAME, Int8Products
from warmgraph_backends.host_api import activations
from warmgraph_backends.kernels.int8_rows import WIDEST, Int8Rows

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
#: Rows, columns, depth: Z-Image at 1024x1024, Wan 14B's 33 frames of 832x480, Flux' last product.
SHAPES = [(4352, 3840, 3840), (14040, 13824, 5120), (14040, 5120, 13824), (4608, 3072, 15360)]
#: Less than half of what one of these products takes on any card.
SHORTEST_MS, LONGEST_MS = 0.01, 1000.0


def _weight(out: int, width: int, dtype: torch.dtype) -> Any:
    tensor = pytest.importorskip("comfy_kitchen.tensor")
    plain = (torch.randn(out, width, device="cuda") / width**0.5).to(dtype)
    return tensor.QuantizedTensor.from_float(
        plain, "TensorWiseINT8Layout", per_channel=True, convrot=True, convrot_groupsize=256
    )


def _gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _rows() -> Int8Rows:
    rows = Int8Rows.compiled(torch.device("cuda"))
    assert rows is not None
    return rows


def _error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.float() - truth).norm() / truth.norm())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [8, 256, 3840, 5128, 13824, WIDEST])
def test_rows_are_quantised_as_the_library_does(width: int, dtype: torch.dtype) -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    x = (3.0 * torch.randn(37, width, device="cuda", generator=draw)).to(dtype)
    x[1] = 0.0
    x[2, width // 2] = 1000.0
    values, scales = _rows().quantise(x)
    exact = (x.float().abs().amax(1, keepdim=True) / 127.0).clamp(min=1e-30)
    torch.testing.assert_close(scales, exact, rtol=1e-6, atol=0.0)
    expected = (x.float() / exact).round()
    difference = (values.float() - expected).abs()  # in the middle it may go either way
    assert float(difference.max()) <= 1.0 and int((difference > 0).sum()) <= 2 + x.numel() // 1000
    assert int(values[2, width // 2]) == 127 and not values[1].any()


@torch.no_grad()
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(wrong: float) -> None:
    x = torch.randn(3, 512, device="cuda", dtype=torch.bfloat16)
    x[1, 77] = wrong
    _, scales = _rows().quantise(x)
    assert scales.isfinite().flatten().tolist() == [True, False, True]


def test_rows_of_other_widths_are_refused() -> None:
    for width in (4, 12, WIDEST + 8):
        with pytest.raises(ValueError, match="multiple of 8"):
            _rows().quantise(torch.zeros(2, width, device="cuda", dtype=torch.bfloat16))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ways_are_timed_and_as_near_to_the_truth(
    shape: tuple[int, int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    rows, out, width = shape
    weight, bias = _weight(out, width, dtype), torch.randn(out, device="cuda").to(dtype)
    x = torch.randn(1, rows, width, device="cuda").to(dtype)
    products = Int8Products(tmp_path, "card")
    found, hosts = products.multiply(x, weight, bias), torch.nn.functional.linear(x, weight, bias)
    times = json.loads((tmp_path / FILE_NAME).read_text())["card"]
    (taken,) = times.values()
    assert taken.keys() == {"host", "apart"}  # none was refused
    assert all(SHORTEST_MS < time < LONGEST_MS for time in taken.values())
    truth = torch.nn.functional.linear(x.float(), weight.dequantize().float(), bias.float())
    assert _error(found, truth) <= 1.02 * _error(hosts, truth)


@torch.no_grad()
@pytest.mark.parametrize("act", ["", "swiglu"])
def test_rows_that_are_rotated_in_pieces_take_less_memory(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "by_turns", lambda *_, **__: {"host": 2.0, "apart": 1.0})
    # The host's own is not asked for: it needs the host's other packages.
    monkeypatch.setattr(activations, "activated", lambda x, act: _gated(x) if act else x)
    products = Int8Products(tmp_path, "card")
    weight = _weight(256, 4096, torch.bfloat16)
    width = 4096 * (2 if act else 1)
    x = torch.randn(16384, width, device="cuda", dtype=torch.bfloat16)
    products.multiply(x, weight, None, act)  # chooses, and takes what is kept

    def result_and_peak(piece: int) -> tuple[torch.Tensor, int]:
        monkeypatch.setattr(int8_products, "PIECE", piece)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = products.multiply(x, weight, None, act)
        return result, torch.cuda.max_memory_allocated() - before

    (whole, most), (pieces, least) = map(result_and_peak, (2**30, 2**22 + 4096))
    assert torch.equal(whole, pieces)
    assert least < 0.75 * most


@torch.no_grad()
def test_a_product_that_is_rotated_apart_may_be_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "by_turns", lambda *_, **__: {"host": 2.0, "apart": 1.0})
    products = Int8Products(tmp_path, "card")
    weight = _weight(3840, 3840, torch.bfloat16)
    x = torch.randn(4352, 3840, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # the library takes memory for each stream
        first = products.multiply(x, weight, None)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = products.multiply(x, weight, None)
    assert set(products.ways.chosen.values()) == {"apart"}
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, products.multiply(x, weight, None))
    assert not torch.equal(captured, first)
