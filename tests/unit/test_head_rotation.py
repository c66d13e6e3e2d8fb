"""Queries and keys normed and rotated by one operator: what the host's code for it gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from warmgraph_backends.compilers.rewrites import tracing
from warmgraph_backends.kinds.layout import CONTIGUOUS
from warmgraph_backends.operators import head_rotation
from warmgraph_tools.inprocess import Host

HEADS, GROUPS, WIDTH = 6, 2, 32


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """As on a GPU, for which the operator is made: the arguments of each call of it."""
    seen: list[tuple[Any, ...]] = []

    def called(*inputs: Any) -> Any:
        seen.append(inputs)
        return head_rotation._run(*inputs)

    monkeypatch.setattr(head_rotation, "is_for", lambda *_: True)
    monkeypatch.setattr(head_rotation, "OPERATOR", called)
    return seen


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextmanager
def equal_with_and_without_tracing(calls: list[Any], times: int) -> Iterator[list[Any]]:
    """Run what is appended to the list given, as it is and while it is traced."""
    runs: list[Any] = []
    yield runs
    (run,) = runs
    expected = run()
    assert not calls
    with tracing(CONTIGUOUS):
        found = run()
    assert len(calls) == times
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is theirs.dtype
        tolerance = 1e-2 if theirs.dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_the_librarys_norm_with_rotation_becomes_the_operator(host: Host, calls: list[Any]) -> None:
    kitchen = pytest.importorskip("comfy_kitchen")
    q, k = draw(2, 5, HEADS, WIDTH, seed=0), draw(2, 5, HEADS, WIDTH, seed=1)
    table = draw(1, 5, 1, WIDTH // 2, 2, 2, seed=2)
    scales = draw(WIDTH, seed=3), draw(WIDTH, seed=4)
    with equal_with_and_without_tracing(calls, 1) as runs:
        runs.append(lambda: kitchen.rms_rope(q, k, table, *scales, 1e-5))
    assert calls[0][5:] == (1e-5, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_and_a_rotation_after_it_become_the_operator(
    host: Host, calls: list[Any], dtype: torch.dtype
) -> None:
    """As Flux has them, heads first, of views of one product; an epsilon that nobody named is
    torch's.
    """
    kitchen = pytest.importorskip("comfy_kitchen")
    product = draw(2, 5, 3 * HEADS * WIDTH, seed=0, dtype=dtype)
    table = draw(2, 1, 5, WIDTH // 2, 2, 2, seed=2)
    norms = [torch.nn.RMSNorm(WIDTH, dtype=dtype) for _ in range(2)]

    def run() -> list[torch.Tensor]:
        q, k, _ = product.view(2, 5, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        return list(kitchen.apply_rope(norms[0](q).to(dtype), norms[1](k).to(dtype), table))

    with equal_with_and_without_tracing(calls, 1) as runs:
        runs.append(run)
    assert calls[0][0].shape == (2, 5, HEADS, WIDTH) and calls[0][6] is True


def test_parts_that_are_joined_become_one_operator_each(host: Host, calls: list[Any]) -> None:
    kitchen = pytest.importorskip("comfy_kitchen")
    parts = {rows: draw(2, 2, HEADS, rows, WIDTH, seed=rows) for rows in (3, 7)}
    norms = {rows: torch.nn.RMSNorm(WIDTH, eps=1e-6) for rows in parts}
    table = draw(2, 1, 10, WIDTH // 2, 2, 2, seed=2)

    def run() -> list[torch.Tensor]:
        normed = [[norms[rows](x) for x in part] for rows, part in parts.items()]
        return list(
            kitchen.apply_rope(*(torch.cat(each, 2) for each in zip(*normed, strict=True)), table)
        )

    with equal_with_and_without_tracing(calls, 2) as runs:
        runs.append(run)
    assert [call[0].shape[1] for call in calls] == [3, 7]


def test_what_was_not_normed_by_heads_is_rotated_alone(host: Host, calls: list[Any]) -> None:
    kitchen = pytest.importorskip("comfy_kitchen")
    q, k = draw(2, HEADS, 5, WIDTH, seed=0), draw(2, HEADS, 5, WIDTH, seed=1)
    table = draw(1, 1, 5, WIDTH // 2, 2, 2, seed=2)
    one, other = torch.nn.RMSNorm(WIDTH, eps=1e-6), torch.nn.RMSNorm(WIDTH, eps=1e-5)
    for queries, keys in ((q, one(k)), (one(q), other(k)), (one(q) + 1, one(k))):
        with equal_with_and_without_tracing(calls, 0) as runs:
            runs.append(lambda q=queries, k=keys: kitchen.apply_rope(q, k, table))


def test_fewer_keys_than_queries_and_a_table_for_all() -> None:
    q, k = draw(2, 5, HEADS, WIDTH, seed=0), draw(2, 5, GROUPS, WIDTH, seed=1)
    table = draw(1, 1, 1, WIDTH // 2, 2, 2, seed=2)
    scales = draw(WIDTH, seed=3), draw(WIDTH, seed=4)
    found = head_rotation.OPERATOR(q, k, table, *scales, 1e-5, False)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, table, *scales)]
        faked = head_rotation.OPERATOR(*fakes, 1e-5, False)
    for x, scale, mine, fake in zip((q, k), scales, found, faked, strict=True):
        exact = torch.nn.functional.rms_norm(x.double(), (WIDTH,), scale.double(), 1e-5)
        pairs = torch.view_as_complex(exact.unflatten(-1, (-1, 2)))
        even, odd = pairs.real, pairs.imag
        t = table.double()
        truth = torch.stack(
            [t[..., i, 0] * even + t[..., i, 1] * odd for i in range(2)], -1
        ).flatten(-2)
        torch.testing.assert_close(mine.double(), truth, rtol=1e-5, atol=1e-5)
        assert mine.is_contiguous() and (fake.shape, fake.stride()) == (mine.shape, mine.stride())


def test_it_is_for_gpus_alone() -> None:
    q = draw(2, 5, HEADS, WIDTH, seed=0, dtype=torch.bfloat16)
    assert not head_rotation.is_for(q, q, draw(1, 5, 1, WIDTH // 2, 2, 2, seed=2))
