"""Products by int8 weights on a real GPU: right and timed in both ways, and captured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.choices import autotuner
from warmgraph_backends.choices.int8_products import FILE_NAME, Int8Products
from warmgraph_backends.kernels.int8_rows import ACTIVATIONS, WIDEST, Int8Rows
from warmgraph_tools.exact_rows import assert_quantised, exact

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
#: Rows, columns, depth: Z-Image at 1024x1024, Wan 14B's 33 frames of 832x480, Flux' last product.
SHAPES = [(4352, 3840, 3840), (14040, 13824, 5120), (14040, 5120, 13824), (4608, 3072, 15360)]
DTYPES = [torch.bfloat16, torch.float16]
#: Of rows that are rotated, and of any.
WIDTHS = {True: (256, 3072, 3840, 5376, 15360, 28672, WIDEST), False: (8, 264, 5128, WIDEST)}
#: Less than half of what one of these products takes on any card.
SHORTEST_MS, LONGEST_MS = 0.01, 1000.0


def _weight(out: int, width: int, dtype: torch.dtype, *, rotated: bool = True) -> Any:
    tensor = pytest.importorskip("comfy_kitchen.tensor")
    plain = (torch.randn(out, width, device="cuda") / width**0.5).to(dtype)
    options = {"convrot": True, "convrot_groupsize": 256} if rotated else {}
    return tensor.QuantizedTensor.from_float(
        plain, "TensorWiseINT8Layout", per_channel=True, **options
    )


def _drawn(count: int, width: int, act: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, width * ACTIVATIONS[act].parts, device="cuda").to(dtype)


@pytest.fixture(scope="module")
def rows(gpu: None) -> Int8Rows:
    return Int8Rows(torch.device("cuda"))


def _error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.float() - truth).norm() / truth.norm())


@torch.no_grad()
@pytest.mark.parametrize("rotated", WIDTHS, ids=["rotated", "plain"])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_as_exact_as_float32(
    rows: Int8Rows, dtype: torch.dtype, act: str, rotated: bool
) -> None:
    for width in WIDTHS[rotated]:
        x = 3.0 * _drawn(37, width, act, dtype)
        x[1] = 0.0
        x[2, width // 2] = 1000.0
        x[3] *= torch.finfo(dtype).tiny
        found = rows.quantise(x, act=act, rotated=rotated)
        assert_quantised(found, exact(x, act, rotated=rotated))


@torch.no_grad()
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_what_is_no_number_stays_none(rows: Int8Rows, act: str, wrong: float) -> None:
    x = _drawn(3, 512, act, torch.bfloat16)
    x[1, 77] = wrong
    for rotated in WIDTHS:
        _, scales = rows.quantise(x, act=act, rotated=rotated)
        finite = exact(x, act, rotated=rotated).isfinite().all(1)
        assert scales.isfinite().flatten().tolist() == finite.tolist()


@torch.no_grad()
def test_rows_beyond_the_range_of_32_bits_are_found(rows: Int8Rows) -> None:
    x = torch.zeros(2**31 // 4096 + 64, 4096, device="cuda", dtype=torch.bfloat16)
    x[-3:] = _drawn(3, 4096, "", torch.bfloat16)
    values, scales = rows.quantise(x, rotated=True)
    assert_quantised((values[-3:], scales[-3:]), exact(x[-3:], "", rotated=True))
    assert not values[:-3].any()


@torch.no_grad()
@pytest.mark.parametrize("rotated", WIDTHS, ids=["rotated", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ways_are_timed_and_as_near_to_the_truth(
    shape: tuple[int, int, int], dtype: torch.dtype, rotated: bool, tmp_path: Path
) -> None:
    rows, out, width = shape
    weight = _weight(out, width, dtype, rotated=rotated)
    bias = torch.randn(out, device="cuda").to(dtype)
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
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_nothing_but_int8_rows_lies_in_memory_between(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotuner, "by_turns", lambda *_, **__: {"host": 2.0, "apart": 1.0})
    products = Int8Products(tmp_path, "card")
    weight, x = _weight(256, 4096, torch.bfloat16), _drawn(16384, 4096, act, torch.bfloat16)
    products.multiply(x, weight, None, act)  # chooses, and takes what is kept
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = products.multiply(x, weight, None, act)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 1.1 * (x.shape[0] * 4096 + 2 * found.numel())
    truth = exact(x, act, rotated=False).float() @ weight.dequantize().float().T
    assert _error(found, truth) < 2e-2


@torch.no_grad()
def test_a_product_by_our_own_kernel_may_be_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotuner, "by_turns", lambda *_, **__: {"host": 2.0, "apart": 1.0})
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


# --- several of one input -------------------------------------------------------------------------

#: Rows, depth, columns of each: queries, keys and values of Wan 14B's 33 frames of 832x480 and of
#: Qwen-Image at 1024x1024; gate and up of Z-Image there.
SETS = [
    (14040, 5120, (5120, 5120, 5120)),
    (4096, 3072, (3072, 3072, 3072)),
    (4352, 3840, (10240, 10240)),
]


def _set(width: int, columns: tuple[int, ...], *, rotated: bool) -> list[tuple[Any, Any]]:
    """Weights with biases; the last one has none."""
    weights = [_weight(out, width, torch.bfloat16, rotated=rotated) for out in columns]
    biases = [torch.randn(out, device="cuda", dtype=torch.bfloat16) for out in columns]
    return list(zip(weights, [*biases[:-1], None], strict=True))


@torch.no_grad()
@pytest.mark.parametrize("rotated", WIDTHS, ids=["rotated", "plain"])
@pytest.mark.parametrize("shape", SETS, ids=str)
def test_several_at_once_equal_each_by_itself(
    shape: tuple[int, int, tuple[int, ...]],
    rotated: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, width, columns = shape
    x, layers = _drawn(rows, width, "", torch.bfloat16), _set(width, columns, rotated=rotated)
    timed = Int8Products(tmp_path, "card")
    found = timed.multiply_several(x, layers)
    (taken,) = json.loads((tmp_path / FILE_NAME).read_text())["card"].values()
    assert taken.keys() == {"host", "apart"}, "none was refused"
    assert all(SHORTEST_MS < time < LONGEST_MS for time in taken.values())
    monkeypatch.setattr(autotuner, "by_turns", lambda *_, **__: {"host": 2.0, "apart": 1.0})
    products = Int8Products(tmp_path / "apart", "card")
    together = products.multiply_several(x, layers)
    assert all(map(torch.equal, together, [products.multiply(x, *layer) for layer in layers]))
    for some in (found, together):
        for mine, (weight, bias) in zip(some, layers, strict=True):
            truth = x.float() @ weight.dequantize().float().T
            assert _error(mine, truth if bias is None else truth + bias.float()) < 2e-2


@torch.no_grad()
def test_several_at_once_may_be_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuner, "by_turns", lambda *_, **__: {"host": 2.0, "apart": 1.0})
    products = Int8Products(tmp_path, "card")
    x, layers = _drawn(4352, 3840, "", torch.bfloat16), _set(3840, (3840, 3840, 512), rotated=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the library takes memory for each stream
        first = products.multiply_several(x, layers)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = products.multiply_several(x, layers)
    assert set(products.ways.chosen.values()) == {"apart"}
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, products.multiply_several(x, layers)))
    assert not any(map(torch.equal, captured, first))
