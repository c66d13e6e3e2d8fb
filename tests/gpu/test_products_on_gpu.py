"""Products in another form on a real GPU: right, and within a graph file's payload."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from warmgraph_backends.kernels import products
from warmgraph_backends.kernels.gpu_time import microseconds
from warmgraph_backends.torch_api import tracing

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
linear = torch.nn.functional.linear
#: Of a sum of products in these dtypes.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
#: batch, tokens, columns, depth: prompts of SDXL, SD1.5 and SD2, a long one, the rows of a small
#: image, one token.
PROMPTS = [
    (2, 77, 1280, 2048),
    (2, 77, 640, 2048),
    (2, 77, 320, 768),
    (1, 77, 1280, 1024),
    (3, 154, 1280, 2048),
    (2, 256, 640, 640),
    (1, 1, 64, 64),
]


def _random(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    return [(torch.randn(s, device="cuda") / s[-1] ** 0.5).to(dtype) for s in shapes]


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


class _Projects(torch.nn.Module):
    """Keys and values of a prompt, and something that reads them."""

    def forward(self, prompt: torch.Tensor, *weights: torch.Tensor) -> Any:
        key, value = (linear(prompt, weight) for weight in weights)
        return torch.nn.functional.silu(key.unflatten(-1, (4, -1)).transpose(1, 2)), value


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", PROMPTS, ids=str)
def test_two_products_are_right_by_one_kernel(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    loaded: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, tokens, columns, depth = shape
    tensors = _random([(batch, tokens, depth), *2 * [(columns, depth)]], dtype)
    tensors[0].mul_(depth**0.5)
    monkeypatch.setattr(products, "_is_quicker", lambda *_: True)
    exported = torch.export.export(_Projects(), tuple(tensors), strict=False)
    assert products.pair(exported.graph_module, contextlib.nullcontext) == 1
    call, _ = loaded(exported.graph_module, tensors, last_pass=products.add_in_place)
    exact = _Projects()(*(tensor.double() for tensor in tensors))
    for found, wanted in zip(call(list(tensors)), exact, strict=True):
        assert found.shape == wanted.shape and _error(found, wanted) <= TOLERANCE[dtype]


def test_products_of_many_rows_stay_apart() -> None:
    """They fill the GPU by one weight alone."""
    rows = products.FEW_ROWS // 154 + 1
    tensors = _random([(rows, 154, 2048), *2 * [(1280, 2048)]], torch.float16)
    exported = torch.export.export(_Projects(), tuple(tensors), strict=False)
    assert products.pair(exported.graph_module, contextlib.nullcontext) == 0


def test_both_forms_are_measured() -> None:
    runs = products._runs((2, 77, 2048), (1280, 2048), torch.float16)
    times = {name: microseconds(run) for name, run in runs.items()}
    assert times.keys() == {"apart", "twin"}
    assert all(time is not None and 1.0 < time < 1000.0 for time in times.values()), times


class _FeedForward(torch.nn.Module):
    """The end of a transformer block."""

    def forward(self, x: torch.Tensor, before: torch.Tensor, *weights: torch.Tensor) -> Any:
        widen, widen_bias, narrow, narrow_bias = weights
        x = before + x
        wide, gate = linear(
            torch.nn.functional.layer_norm(x, x.shape[-1:]), widen, widen_bias
        ).chunk(2, dim=-1)
        y = linear(wide * torch.nn.functional.gelu(gate), narrow, narrow_bias)
        y += x
        return (y,)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("any_size", [True, False], ids=["any size", "one size"])
def test_a_block_adds_its_last_product_in_place(
    dtype: torch.dtype, any_size: bool, loaded: Any
) -> None:
    widths = [(2560, 320), (2560,), (320, 1280), (320,)]
    tensors = [*_random([(2, 256, 320)] * 2, dtype), *_random(widths, dtype)]
    size = {1: torch.export.Dim("rows", min=1, max=4096)} if any_size else None
    with torch.no_grad(), tracing.size_oblivious():
        exported = torch.export.export(
            _FeedForward(),
            tuple(tensors),
            dynamic_shapes={"x": size, "before": size, "weights": 4 * (None,)},
            strict=False,
        )
    call, source = loaded(exported.graph_module, tensors, last_pass=products.add_in_place)
    assert source.count("aten.addmm_.default(") == 1
    for rows in (256, 1, 77) if any_size else (256,):
        tensors[:2] = _random([(2, rows, 320)] * 2, dtype)
        before = [tensor.clone() for tensor in tensors]
        [found] = call(list(tensors))
        [exact] = _FeedForward()(*(tensor.double() for tensor in tensors))
        assert _error(found, exact) <= TOLERANCE[dtype]
        assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
