"""How far a graph may be from eager: as far as the coarsest dtype that takes part may move it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends.kinds.tolerance import COARSEST, RELATIVE_L2, bound, judge

ONES = {name: torch.ones(3, dtype=getattr(torch, name)) for name in RELATIVE_L2}


@pytest.mark.parametrize("name", RELATIVE_L2)
def test_a_result_is_compared_by_its_own_dtype_and_by_coarser_ones_of_its_inputs(name: str) -> None:
    assert bound(ONES[name], []) == bound(ONES[name], [ONES["float32"], 3]) == RELATIVE_L2[name]
    for other, ones in ONES.items():
        assert bound(ONES[name], [ones]) == max(RELATIVE_L2[name], RELATIVE_L2[other])


def test_a_residual_in_float32_of_a_block_in_float16_is_good_where_float16_would_be() -> None:
    result = [ONES["float32"] * 1.001]
    assert not judge(result, [ONES["float32"]], [ONES["float32"]]).is_good
    found = judge(result, [ONES["float32"]], [ONES["float32"], ONES["float16"]])
    assert found.is_good and found.share == pytest.approx(0.2, rel=1e-2)
    assert not judge([ONES["float16"]], [ONES["float32"]], [ONES["float16"]]).is_good


def test_what_a_format_costs_is_the_bound_where_it_is_larger_than_that_of_the_dtypes() -> None:
    reference = ONES["bfloat16"]
    asked = []

    def in_full(cost: float) -> Any:
        def compute() -> list[torch.Tensor]:
            asked.append(cost)
            return [reference.float() / (1 + cost)]

        return compute

    near, far = reference * 1.0156, reference * 1.0625
    assert judge([near], [reference], [], in_full=in_full(0.05)).is_good and not asked
    assert not judge([far], [reference], []).is_good
    assert not judge([far], [reference], [], in_full=in_full(0.01)).is_good
    found = judge([far], [reference], [], in_full=in_full(0.05))
    assert found.is_good and found.bounds == (pytest.approx(0.05 * 2**0.5, rel=1e-3),)
    assert found.share == pytest.approx(0.0625 / (0.05 * 2**0.5), rel=1e-3)
    assert asked == [0.01, 0.05]


@pytest.mark.parametrize(("one", "bound"), [(1.0, COARSEST), (torch.inf, RELATIVE_L2["float16"])])
def test_no_format_costs_so_much_that_anything_is_good(one: float, bound: float) -> None:
    reference = torch.tensor([1.0, one], dtype=torch.float16)
    full = [torch.full_like(reference, 0.1)]
    found = judge([reference * 2], [reference], [], in_full=lambda: full)
    assert found.bounds == (bound,) and not found.is_good
