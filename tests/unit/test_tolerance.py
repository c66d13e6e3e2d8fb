"""How far a graph may be from eager: as far as the coarsest dtype that takes part may move it."""

from __future__ import annotations

import pytest
import torch

from warmgraph_backends.kinds.tolerance import RELATIVE_L2, bound, difference

ONES = {name: torch.ones(3, dtype=getattr(torch, name)) for name in RELATIVE_L2}


@pytest.mark.parametrize("name", RELATIVE_L2)
def test_a_result_is_compared_by_its_own_dtype_and_by_coarser_ones_of_its_inputs(name: str) -> None:
    assert bound(ONES[name], []) == bound(ONES[name], [ONES["float32"], 3]) == RELATIVE_L2[name]
    for other, ones in ONES.items():
        assert bound(ONES[name], [ones]) == max(RELATIVE_L2[name], RELATIVE_L2[other])


def test_a_residual_in_float32_of_a_block_in_float16_is_good_where_float16_would_be() -> None:
    result = [ONES["float32"] * 1.001]
    assert not difference(result, [ONES["float32"]], [ONES["float32"]]).is_good
    found = difference(result, [ONES["float32"]], [ONES["float32"], ONES["float16"]])
    assert found.is_good and found.share == pytest.approx(0.2, rel=1e-2)
    assert not difference([ONES["float16"]], [ONES["float32"]], [ONES["float16"]]).is_good
