"""What the kernel for int8 rows computes: its very source, run by a processor, beside float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from warmgraph_backends.kernels import int8_rows
from warmgraph_backends.kernels.int8_rows import ACTIVATIONS, GROUP, WIDEST, Int8Rows
from warmgraph_tools import cuda_on_cpu
from warmgraph_tools.exact_rows import assert_quantised, exact, hadamard

DTYPES = [torch.float16, torch.bfloat16]
#: One group; the widths of Flux, H3 and Flux' last product; more than half of the longest row.
WIDTHS = (256, 3072, 5376, 15360, 28672)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Int8Rows:
    def compile_kernel(source: str, name: str, *_: Any) -> Any:
        return cuda_on_cpu.compile_cuda(source, name)

    monkeypatch.setattr(int8_rows, "compile_or_warn", compile_kernel)
    return Int8Rows(torch.device("cpu"))


def drawn(
    count: int, width: int, act: str = "", dtype: torch.dtype = torch.float16
) -> torch.Tensor:
    draw = torch.Generator().manual_seed(width)
    return (3.0 * torch.randn(count, width * ACTIVATIONS[act].parts, generator=draw)).to(dtype)


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_sort_is_as_exact_as_float32(
    rows: Int8Rows, dtype: torch.dtype, act: str, rotated: bool
) -> None:
    for width in WIDTHS:
        x = drawn(2, width, act, dtype)
        x[1] *= 0.01
        assert rows.takes(x, act=act, rotated=rotated)
        found = rows.quantise(x, act=act, rotated=rotated)
        assert_quantised(found, exact(x, act, rotated=rotated))


def test_each_element_is_rotated_into_its_own_place(rows: Int8Rows) -> None:
    """One number alone becomes a column of the matrix, whatever thread holds it."""
    x = 16.0 * torch.eye(GROUP).repeat(1, 5).half()
    values, scales = rows.quantise(x, rotated=True)
    found = (values.double() * scales.double()).view(GROUP, 5, GROUP)
    torch.testing.assert_close(found, 16.0 * hadamard()[:, None].expand_as(found))


@pytest.mark.parametrize("width", [8, 264, 1032, WIDEST])
def test_what_is_not_rotated_is_of_any_width(rows: Int8Rows, width: int) -> None:
    x = drawn(3, width, dtype=torch.bfloat16)
    assert_quantised(rows.quantise(x), x.double())


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_at_the_ends_of_a_dtype(rows: Int8Rows, dtype: torch.dtype, rotated: bool) -> None:
    x = drawn(6, 768, dtype=dtype)
    x[4] *= 1e-25 if dtype is torch.bfloat16 else 1e-6  # the smallest scale is below
    x[0] = 0.0
    x[1, 300] = 1000.0  # all others become small
    x[2] *= torch.finfo(dtype).tiny
    x[3] = torch.finfo(torch.float16).max * hadamard()[3].sign().repeat(3)  # sums pass float16
    values, scales = rows.quantise(x, rotated=rotated)
    assert_quantised((values, scales), exact(x, "", rotated=rotated))
    assert not values[0].any() and float(scales[0]) == pytest.approx(1e-30)
    if rotated:
        assert values[3].nonzero().flatten().tolist() == [3, 259, 515]


def test_a_row_below_the_smallest_scale_is_zeros(rows: Int8Rows) -> None:
    x = torch.full((2, 512), 1e-34, dtype=torch.bfloat16)
    for rotated in (False, True):
        values, scales = rows.quantise(x, rotated=rotated)
        assert not values.any() and (scales == torch.tensor(1e-30)).all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_what_is_no_number_stays_none(rows: Int8Rows, act: str, wrong: float) -> None:
    """But where an activation makes a number of it, as that of a negative infinity."""
    x = drawn(3, 512, act)
    for place, rotated in itertools.product((77, 500), (False, True)):
        changed = x.clone()
        changed[1, place] = wrong
        _, scales = rows.quantise(changed, act=act, rotated=rotated)
        finite = exact(changed, act, rotated=rotated).isfinite().all(1)
        assert scales.isfinite().flatten().tolist() == finite.tolist()
        assert finite.tolist()[::2] == [True, True]


@pytest.mark.parametrize("act", ["gelu_tanh", "swiglu"])
def test_activations_of_large_numbers_are_the_numbers_or_nothing(rows: Int8Rows, act: str) -> None:
    numbers = torch.tensor([-1e18, -3e4, -90.0, -2.0, -0.0, 0.0, 2.0, 90.0, 3e4, 1e18])
    x = numbers[:, None].repeat(1, 64).bfloat16()
    assert_quantised(rows.quantise(x, act=act), exact(x, act, rotated=False))


def test_rows_that_no_kernel_takes_are_refused(rows: Int8Rows) -> None:
    longest = torch.zeros(2, WIDEST + 256, dtype=torch.float16)
    whole = torch.zeros(2, 1024, dtype=torch.float16)
    cases = (
        (longest, "", True),
        (longest, "", False),
        (whole[:, :4].contiguous(), "", False),
        (whole[:, :264].contiguous(), "", True),
        (whole[:, :256].contiguous(), "swiglu", True),
        (whole[:, :0].contiguous(), "", False),
        (whole.view(-1)[1:257].view(1, 256), "", False),  # begins amid what is read at once
        (whole.float(), "", False),
        (whole, "silu", False),
    )
    for x, act, rotated in cases:
        assert not rows.takes(x, act=act, rotated=rotated)
        with pytest.raises(ValueError, match="must be contiguous, aligned, and of a width"):
            rows.quantise(x, act=act, rotated=rotated)
    with pytest.raises(ValueError, match="must be contiguous"):
        rows.quantise(whole[:, ::2])
    assert rows.takes(longest[:, :-256].repeat(1, 2), act="swiglu", rotated=True)


def test_nothing_is_compiled_while_a_call_is_captured(
    rows: Int8Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = drawn(1, 256)
    rows.quantise(x)
    monkeypatch.setattr(int8_rows, "is_capturing", lambda _: True)
    assert rows.takes(x) and not rows.takes(x, rotated=True)
    with pytest.raises(RuntimeError, match="there is no kernel for Sort"):
        rows.quantise(x, rotated=True)
    monkeypatch.undo()
    assert rows.takes(x)


def test_where_nothing_compiles_it_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(int8_rows, "compile_or_warn", lambda *given: asked.append(given))
    rows, x = Int8Rows(torch.device("cpu")), drawn(1, 256)
    assert not rows.takes(x) and not rows.takes(x)
    assert len(asked) == 1
