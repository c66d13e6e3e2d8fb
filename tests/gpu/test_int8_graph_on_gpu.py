"""Our graph for products of int8 rows on a real GPU: exact sums at any size, in every form of its
kernel, chosen by its time, and captured.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warmgraph_backends.choices import autotuner
from warmgraph_backends.choices.int8_products import FILE_NAME, Int8Products
from warmgraph_backends.choices.own_products import form_of
from warmgraph_backends.device.gpu import shared_memory_bytes
from warmgraph_backends.families import int8_product
from warmgraph_backends.kernels import int8_sums
from warmgraph_backends.torch_api import tracing

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
#: Of results in these dtypes, which are rounded once.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
#: Rows, columns, depth: less than a tile of each, a bit more than some, and people's.
SIZES = [
    (1, 16, 16),
    (17, 272, 144),
    (100, 528, 28672),
    (257, 4112, 5376),
    (1000, 48, 80),
    (4608, 3072, 15360),
]
#: What it is tuned for here.
TUNED = (1024, 2048, 2048)
SHORTEST_MS, LONGEST_MS = 0.005, 1000.0
Build = Callable[..., Any]


class _Product(torch.nn.Module):
    """The form's own maths, in whose place our kernel is traced."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return int8_product.FORMS["product"].reference(self, *inputs)  # type: ignore[no-any-return]


def _factors(dtype: torch.dtype, rows: int, columns: int, depth: int) -> list[torch.Tensor]:
    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8)

    def some(*shape: int) -> torch.Tensor:
        return 1e-3 * torch.rand(shape, device="cuda")

    bias = torch.randn(columns // 16, 16, device="cuda").to(dtype)
    weight = whole(columns // 16, 16, depth // 16, 16)
    return [whole(rows, depth // 16, 16), some(rows, 1), weight, some(columns // 16, 16), bias]


@pytest.fixture
def built(loaded: Any) -> Build:
    """`built(dtype)`: the call of a graph that was compiled, packed and loaded here."""

    def build(dtype: torch.dtype) -> Any:
        given = _factors(dtype, *TUNED)
        dims = {
            name: torch.export.Dim(name, min=2, max=symbol.maximum)
            for name, symbol in int8_product.SYMBOLS.items()
        }
        specs = int8_product.FORMS["product"].inputs(None, str(dtype).removeprefix("torch."))
        shapes = tuple(
            {place: dims[name] for place, name in enumerate(spec.dims) if name in dims}
            for spec in specs
        )
        with torch.no_grad(), tracing.size_oblivious():
            exported = torch.export.export(
                _Product(), tuple(given), dynamic_shapes=(shapes,), strict=False
            )
        call, source = loaded(exported.graph_module, given)
        assert "_int8_gemm" in source
        return call

    return build


def _check(call: Any, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    given = _factors(dtype, *sizes)
    (found,) = call(list(given))
    exact = int8_sums.multiply(*given)
    assert found.shape == exact.shape and found.dtype is dtype and found.is_contiguous()
    error = float((found.double() - exact.double()).norm() / exact.double().norm())
    assert error <= TOLERANCE[dtype], (sizes, error)


@torch.no_grad()
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_it_is_exact_at_any_size(built: Build, dtype: torch.dtype) -> None:
    call = built(dtype)
    for sizes in SIZES:
        _check(call, dtype, sizes)


@torch.no_grad()
@pytest.mark.parametrize("number", range(4))
def test_so_it_is_in_every_form_of_the_kernel(
    built: Build, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = importlib.import_module("warmgraph_backends.kernels.int8_product")
    tile = kernel.TILES[number]
    if tile.shared_bytes > shared_memory_bytes(torch.device("cuda")):
        pytest.skip("this card's blocks have less shared memory")
    monkeypatch.setattr(kernel, "tiles_for", lambda _: (tile,))
    call = built(torch.bfloat16)
    for sizes in SIZES:
        _check(call, torch.bfloat16, sizes)


@torch.no_grad()
def test_the_largest_sums_do_not_overflow(built: Build) -> None:
    rows, scales, weight, weight_scales, bias = _factors(torch.float32, 33, 64, 2**17)
    rows.fill_(127)
    weight.fill_(-127)
    given = [rows, torch.ones_like(scales), weight, torch.ones_like(weight_scales), 0 * bias]
    (found,) = built(torch.float32)(given)
    assert torch.equal(found, torch.full_like(found, -127 * 127 * 2**17))


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(140_000, 16384, 64), (2**18 + 3, 64, 8192 + 64)], ids=str)
def test_elements_beyond_the_range_of_32_bits_are_found(
    built: Build, sizes: tuple[int, int, int]
) -> None:
    """Of the result, and of the rows."""
    given = _factors(torch.bfloat16, *sizes)
    (found,) = built(torch.bfloat16)(list(given))
    rows, scales, *others = given
    for part in (slice(0, 5), slice(-5, None)):
        exact = int8_sums.multiply(rows[part], scales[part], *others)
        torch.testing.assert_close(found[part], exact, rtol=2**-7, atol=1e-6)


def _offered(call: Any, dtype: torch.dtype, directory: Path) -> Int8Products:
    """Products that may choose a graph."""

    def drop(reason: Any) -> None:
        raise AssertionError(reason)

    products = Int8Products(directory, "card")
    graph = SimpleNamespace(key="0123456789", loaded=SimpleNamespace(call=call), drop=drop)
    products.own.graphs.offer(form_of(dtype), "cuda", graph)
    return products


def _weight(columns: int, depth: int, dtype: torch.dtype, *, rotated: bool) -> Any:
    tensor = pytest.importorskip("comfy_kitchen.tensor")
    plain = (torch.randn(columns, depth, device="cuda") / depth**0.5).to(dtype)
    options = {"per_channel": True, "convrot": True, "convrot_groupsize": 256} if rotated else {}
    return tensor.QuantizedTensor.from_float(
        plain, "TensorWiseINT8Layout", scale="recalculate", **options
    )


@torch.no_grad()
@pytest.mark.parametrize("rotated", [True, False], ids=["rotated", "plain"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_all_ways_are_timed_and_as_near_to_the_truth(
    built: Build, dtype: torch.dtype, rotated: bool, tmp_path: Path
) -> None:
    """A weight that is not rotated has one scale here; rows in float32 are the library's to
    quantise, and rotated ones the host's.
    """
    if dtype is torch.float32 and rotated:
        pytest.skip("no kernel of ours rotates rows in float32")
    products = _offered(built(dtype), dtype, tmp_path)
    weight = _weight(11520, 3840, dtype, rotated=rotated)
    x = torch.randn(1, 4224, 3840, device="cuda").to(dtype)
    for bias in (torch.randn(11520, device="cuda").to(dtype), None):
        found = products.multiply(x, weight, bias)
        hosts = torch.nn.functional.linear(x, weight, bias)
        added = None if bias is None else bias.double()
        truth = torch.nn.functional.linear(x.double(), weight.dequantize().double(), added)
        errors = [float((each.double() - truth).norm() / truth.norm()) for each in (found, hosts)]
        assert errors[0] <= 1.02 * errors[1]
    (taken,) = json.loads((tmp_path / FILE_NAME).read_text())["card"].values()
    assert taken.keys() == {"host", "ours"} | ({"apart"} if dtype is not torch.float32 else set())
    assert all(SHORTEST_MS < time < LONGEST_MS for time in taken.values())


@torch.no_grad()
def test_a_product_by_it_may_be_captured(
    built: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"host": 2.0, "apart": 1.0, "ours": 0.5}
    monkeypatch.setattr(autotuner, "by_turns", lambda *_, **__: times)
    products = _offered(built(torch.bfloat16), torch.bfloat16, tmp_path)
    weight = _weight(3840, 3840, torch.bfloat16, rotated=True)
    x = torch.randn(4352, 3840, device="cuda", dtype=torch.bfloat16)
    first = products.multiply(x, weight, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = products.multiply(x, weight, None)
    assert set(products.ways.chosen.values()) == {"ours"}
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, products.multiply(x, weight, None))
    assert not torch.equal(captured, first)
