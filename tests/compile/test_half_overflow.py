"""What overflows in float16 is bounded as eager bounds it: expressions of the host's, compiled as
regions are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from warmgraph_backends.kernels import rounding
from warmgraph_backends.target.compiler_options import CONFIG, CPU_CONFIG, ROUNDING_CONFIG
from warmgraph_backends.torch_api import compiling, tracing
from warmgraph_tools.overflowing_expressions import EXPRESSIONS, WIDTH, Expression, Region, cases


def _compiled(expression: Expression) -> Any:
    rows = torch.export.Dim("rows", min=2, max=1024)
    inputs = tuple(torch.ones(4, WIDTH, dtype=torch.float16) for _ in range(3))
    with torch.no_grad(), tracing.size_oblivious():
        program = torch.export.export(Region(expression), inputs, dynamic_shapes=3 * ({0: rows},))
    assert rounding.may_bound_overflows(program.graph)
    config = {**CONFIG, **CPU_CONFIG, **ROUNDING_CONFIG}
    return compiling.compile_wrapper(program.graph_module, config, last_pass=rounding.round_all)[
        0
    ].call


#: A bound, what is asked of a number, sums, products and joins; the others with `--all`.
QUICK = ("silu", "infinite", "norm", "clamp", "joined", "wide", "product")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in EXPRESSIONS]
)
def test_an_overflow_is_bounded_as_eager_bounds_it(name: str) -> None:
    expression = EXPRESSIONS[name]
    call = _compiled(expression)
    for case, inputs in cases("cpu").items():
        (found,) = call([each.clone() for each in inputs])
        wanted = expression(*inputs)
        torch.testing.assert_close(
            found,
            wanted,
            rtol=2e-3,
            atol=0,
            equal_nan=True,
            msg=lambda m, case=case: f"{case}: {m}",
        )


@pytest.mark.parametrize(
    ("expression", "dtype", "bounds"),
    [
        (EXPRESSIONS["silu"], torch.float16, True),
        (EXPRESSIONS["silu"], torch.bfloat16, False),
        (
            lambda x, g, o: functional.silu(functional.layer_norm(x + g * o, [WIDTH])) / 2,
            None,
            False,
        ),
        (lambda x, g, o: (x.float() / g.float()).half(), torch.float16, False),
        (lambda x, g, o: x.T.unflatten(0, (2, -1)).nan_to_num(0.0) * 2, torch.float16, False),
        (
            lambda x, g, o: x[:, :2] * functional.linear(g, o).chunk(2, -1)[0].sigmoid(),
            torch.float16,
            False,
        ),
        (lambda x, g, o: (x * g)[1:].unflatten(1, (2, -1)).sigmoid(), torch.float16, True),
    ],
)
def test_only_graphs_in_which_an_overflow_may_become_finite_are_compiled_otherwise(
    expression: Expression, dtype: torch.dtype | None, bounds: bool
) -> None:
    inputs = tuple(torch.ones(4, WIDTH, dtype=dtype or torch.float16) for _ in range(3))
    program = torch.export.export(Region(expression), inputs)
    assert rounding.may_bound_overflows(program.graph) is bounds


def test_the_cpp_compilers_memory_of_conversions_comes_back() -> None:
    from torch._inductor.codegen.cpp import CppKernel

    before = CppKernel.cache_dtype_convert
    _compiled(EXPRESSIONS["silu"])
    assert CppKernel.cache_dtype_convert is before
