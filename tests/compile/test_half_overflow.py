"""What overflows in float16 is bounded as eager bounds it: expressions of the host's, compiled as
regions are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from warmgraph_backends.kernels import rounding
from warmgraph_backends.target.compiler_options import CONFIG, CPU_CONFIG, ROUNDING_CONFIG
from warmgraph_backends.torch_api import compiling, tracing

WIDTH = 64
MOST = 65504.0

Expression = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _bounded(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=MOST, neginf=-MOST)


def _wide_and_back(x: torch.Tensor, g: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """An explicit rounding between two in float32."""
    return ((x.float() * 300).half().float() * 1e-3).half() + torch.isinf(x * g)


def _unrounded_within(x: torch.Tensor, g: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """One operator, which rounds once; a bound reads what it gives."""
    return _bounded(torch.addcmul(x, g, o)[:, 1:])


#: The host's forms: `lumina/model.py`, `flux/{layers,model}.py` and `minimax/vae.py` bound so, and
#: what else makes a finite number of an infinity.
EXPRESSIONS: dict[str, Expression] = {
    "silu": lambda x, g, o: _bounded(functional.silu(g) * o),
    "gated": lambda x, g, o: _bounded(x + g * o),
    "addcmul": _unrounded_within,
    "infinite": lambda x, g, o: torch.where(torch.isinf(g * o), 0, g * o),
    "finite": lambda x, g, o: torch.where(torch.isfinite(g * o), g * o, x),
    "not a number": lambda x, g, o: torch.where(torch.isnan(g * o - g * g), 1, x),
    "norm": lambda x, g, o: _bounded(functional.rms_norm(g * o, [WIDTH], x[0])),
    "mean": lambda x, g, o: (g * o).mean(-1).nan_to_num(posinf=MOST),
    "sum": lambda x, g, o: _bounded((g * 8 + x * 0).sum(-1)),
    "clamp": lambda x, g, o: (x + g * o).clamp(-448, 448),
    "scaled clamp": lambda x, g, o: (g * o * 1e-3).clamp(-1000, 1000),
    "divided": lambda x, g, o: x / (g * o),
    "root": lambda x, g, o: x * torch.rsqrt((g * g).mean(-1, keepdim=True)),
    "gate": lambda x, g, o: _bounded(x + torch.tanh(g * o * 1e-5) * o),
    "joined": lambda x, g, o: _bounded(torch.cat([g * o, x], 1)[:, WIDTH // 2 :]),
    "wide": _wide_and_back,
    "product": lambda x, g, o: _bounded(x + functional.linear(g, o[:1].expand(WIDTH, WIDTH))),
}
#: Elements of x, g and o.
VALUES = {
    "one rounding": (40000.0, 100.0, 300.0),
    "two roundings": (-40000.0, 100.0, 1000.0),
    "large": (300.0, 300.0, 300.0),
    "below zero": (-300.0, 300.0, -300.0),
    "infinite": (float("inf"), -300.0, 300.0),
    "no number": (float("nan"), 300.0, 300.0),
    "sound": (0.5, -1.25, 0.75),
}


class _Region(torch.nn.Module):
    def __init__(self, expression: Expression) -> None:
        super().__init__()
        self._expression = expression

    def forward(self, x: torch.Tensor, g: torch.Tensor, o: torch.Tensor) -> tuple[torch.Tensor]:
        return (self._expression(x, g, o),)


def _compiled(expression: Expression) -> Any:
    rows = torch.export.Dim("rows", min=2, max=1024)
    inputs = tuple(torch.ones(4, WIDTH, dtype=torch.float16) for _ in range(3))
    with torch.no_grad(), tracing.size_oblivious():
        program = torch.export.export(_Region(expression), inputs, dynamic_shapes=3 * ({0: rows},))
    assert rounding.may_bound_overflows(program.graph)
    config = {**CONFIG, **CPU_CONFIG, **ROUNDING_CONFIG}
    return compiling.compile_wrapper(program.graph_module, config, last_pass=rounding.round_all)[
        0
    ].call


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_overflow_is_bounded_as_eager_bounds_it(name: str) -> None:
    expression = EXPRESSIONS[name]
    call = _compiled(expression)
    generator = torch.Generator().manual_seed(0)
    cases = {
        name: [torch.full((3, WIDTH), value, dtype=torch.float16) for value in values]
        for name, values in VALUES.items()
    }
    cases["spread"] = [(300 * torch.randn(3, WIDTH, generator=generator)).half() for _ in range(3)]
    for case, inputs in cases.items():
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
    ],
)
def test_only_graphs_in_which_an_overflow_may_become_finite_are_compiled_otherwise(
    expression: Expression, dtype: torch.dtype | None, bounds: bool
) -> None:
    inputs = tuple(torch.ones(4, WIDTH, dtype=dtype or torch.float16) for _ in range(3))
    program = torch.export.export(_Region(expression), inputs)
    assert rounding.may_bound_overflows(program.graph) is bounds


def test_the_cpp_compilers_memory_of_conversions_comes_back() -> None:
    from torch._inductor.codegen.cpp import CppKernel

    before = CppKernel.cache_dtype_convert
    _compiled(EXPRESSIONS["silu"])
    assert CppKernel.cache_dtype_convert is before
