"""Queries and keys normed and rotated by our own kernel on a real GPU: as near to the truth as
PyTorch's own maths, however they lie in memory, and captured.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends.operators import head_rotation

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def _inputs(
    dtype: torch.dtype, width: int, heads: tuple[int, int], *, batch: int, rows: int, tables: int
) -> list[Any]:
    """Queries, keys and values as one product gives them, a table and two scales."""
    product = torch.randn(batch, rows, (heads[0] + 2 * heads[1]) * width, device="cuda").to(dtype)
    q = product[..., : heads[0] * width].unflatten(-1, (heads[0], width))
    k = product[..., heads[0] * width :][..., : heads[1] * width].unflatten(-1, (heads[1], width))
    table = torch.randn(tables, rows, 1, width // 2, 2, 2, device="cuda")
    scales = [torch.randn(width, device="cuda").to(d) for d in (dtype, torch.float32)]
    return [q, k, table, *scales]


@torch.no_grad()
@pytest.mark.parametrize("rounds", [True, False], ids=["rounded", "not rounded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("heads", [(24, 24), (30, 30), (12, 3), (3, 1)], ids=str)
def test_the_kernel_equals_the_maths(
    heads: tuple[int, int], width: int, dtype: torch.dtype, rounds: bool
) -> None:
    for batch, rows, tables in ((1, 1, 1), (2, 77, 1), (3, 129, 3)):
        inputs = _inputs(dtype, width, heads, batch=batch, rows=rows, tables=tables)
        assert head_rotation._fits(*inputs)
        q, k, table, q_scale, k_scale = inputs
        found = head_rotation.OPERATOR(*inputs, 1e-6, rounds)
        for x, scale, mine in ((q, q_scale, found[0]), (k, k_scale, found[1])):
            plain = head_rotation._plain(x, table, scale, 1e-6, rounds=rounds)
            truth = head_rotation._plain(x.double(), table, scale, 1e-6, rounds=False)
            assert mine.is_contiguous() and mine.shape == x.shape and mine.dtype is dtype
            error, known = ((y.double() - truth).norm() / truth.norm() for y in (mine, plain))
            assert error <= 1.05 * known


@torch.no_grad()
def test_what_lies_otherwise_is_computed_by_pytorch() -> None:
    q, k, table, *scales = _inputs(torch.bfloat16, 128, (4, 4), batch=2, rows=9, tables=2)
    expected = head_rotation.OPERATOR(q, k, table, *scales, 1e-6, False)
    shifted = torch.zeros(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape).copy_(q)
    assert shifted.data_ptr() % 16
    found = head_rotation.OPERATOR(shifted, k, table, *scales, 1e-6, False)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    by_heads = q.transpose(1, 2).contiguous().transpose(1, 2)
    found = head_rotation.OPERATOR(by_heads, k, table, *scales, 1e-6, False)
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


@torch.no_grad()
def test_what_is_no_number_stays_none() -> None:
    inputs = _inputs(torch.bfloat16, 128, (4, 4), batch=1, rows=3, tables=1)
    inputs[0][0, 1, 2, 5] = float("nan")
    found, _ = head_rotation.OPERATOR(*inputs, 1e-6, True)
    assert found.isnan().sum() == 128 and bool(found[0, 1, 2].isnan().all())


@torch.no_grad()
def test_it_may_be_captured() -> None:
    inputs = _inputs(torch.bfloat16, 128, (24, 24), batch=1, rows=4608, tables=1)
    head_rotation.OPERATOR(*inputs, 1e-6, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = head_rotation.OPERATOR(*inputs, 1e-6, True)
    inputs[0].copy_(torch.randn_like(inputs[0]))
    graph.replay()
    torch.cuda.synchronize()
    again = head_rotation.OPERATOR(*inputs, 1e-6, True)
    assert all(torch.equal(*each) for each in zip(captured, again, strict=True))
