"""Products in another form on a real GPU: right, and within a graph file's payload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from warmgraph_backends.kernels import products
from warmgraph_backends.torch_api import tracing

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
linear = torch.nn.functional.linear
#: Of a sum of products in these dtypes.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def _random(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    return [(torch.randn(s, device="cuda") / s[-1] ** 0.5).to(dtype) for s in shapes]


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


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
