"""A graph beside the host's code at all ends of its sizes, on hosts that compute some of them
wrongly themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.contract import Program, Symbol
from warmgraph_backends.errors import BuildError
from warmgraph_backends.families.catalogue import code_of, plan_model
from warmgraph_backends.plans.specs import describe_place
from warmgraph_backends.worker.checks import checked
from warmgraph_backends.worker.export import export
from warmgraph_tools.inprocess import Host

Results = tuple[torch.Tensor, ...]
#: What becomes of a result of a convolution whose input has so many columns.
Harm = Callable[[Results], Results]
MOST = {"batch": 4096, "height": 8192, "width": 8192}


@pytest.fixture(scope="module")
def program(host: Host) -> Program:
    """A convolution of 3x3, stride 2, in bfloat16."""
    model = host.load("narrowxl")[0].model.diffusion_model
    plan = plan_model(model)
    assert not isinstance(plan, str)
    place = next(place for place in plan.places if place.form.name == "down")
    description = describe_place(place, plan, dtype=torch.bfloat16, device="cpu")
    return export(code_of(description))


def on_a_host(program: Program, harm: Harm, columns: int) -> Program:
    """Where convolutions of bfloat16 are wrong at so few columns; those of float64 are right."""

    def run(weights: Any, inputs: Any) -> Results:
        results = tuple(program.run(weights, inputs))
        is_hit = inputs[0].dtype is torch.bfloat16 and inputs[0].shape[-1] <= columns
        return harm(results) if is_hit else results

    return dataclasses.replace(program, run=run)


def filled(value: float) -> Harm:
    return lambda results: tuple(torch.full_like(result, value) for result in results)


def graph_of(program: Program) -> Callable[[list[Any]], Any]:
    """As a compiler would make it: right."""
    return lambda arguments: [
        result.clone(memory_format=torch.channels_last)
        for result in program.graph_module(*arguments)
    ]


def same_but(program: Program, harm: Harm, columns: int) -> Callable[[list[Any]], Any]:
    """A graph that is wrong at so few columns."""
    right, at = graph_of(program), len(program.weights)

    def call(arguments: list[Any]) -> Any:
        results = tuple(right(arguments))
        return harm(results) if arguments[at].shape[-1] <= columns else results

    return call


def widths(checks: list[dict[str, Any]]) -> set[int]:
    return {each["sizes"]["width"] for each in checks}


def test_a_sound_host_tells_something_at_every_size(program: Program) -> None:
    checks = checked(program, graph_of(program))
    assert len(checks) == 2 + 3 + 3 and {1, 7} < widths(checks)
    assert all(each["error"] < 0.03 for each in checks)


@pytest.mark.parametrize("theirs", [float("nan"), float("inf"), 1e38, 0.0])
@pytest.mark.parametrize("ours", [float("nan"), 2e38, 3.0])
def test_sizes_at_which_the_host_is_wrong_are_passed_over(
    program: Program, theirs: float, ours: float
) -> None:
    """A graph calls the same convolution, and gives other garbage."""
    broken = on_a_host(program, filled(theirs), columns=2)
    checks = checked(broken, same_but(program, filled(ours), columns=2))
    assert checks and min(widths(checks)) == 7


@pytest.mark.parametrize("theirs", [float("nan"), 1e38])
def test_a_graph_that_is_wrong_where_the_host_is_right_is_refused(
    program: Program, theirs: float
) -> None:
    broken = on_a_host(program, filled(theirs), columns=2)
    wrong = same_but(program, lambda results: tuple(1.1 * each for each in results), columns=7)
    with pytest.raises(BuildError, match=r"differs from ComfyUI's result by .*'width': 7"):
        checked(broken, wrong)


def test_a_graph_is_refused_if_the_host_is_wrong_everywhere(program: Program) -> None:
    broken = on_a_host(program, filled(float("nan")), columns=MOST["width"])
    with pytest.raises(BuildError, match="ComfyUI's own result is wrong here at every size"):
        checked(broken, graph_of(program))


def test_no_size_is_below_the_least_that_a_symbol_may_be(program: Program) -> None:
    """Not even where the largest is halved until it can be tried."""
    least = {"batch": 3, "height": 90, "width": 130}
    symbols = tuple(Symbol(name, least[name], MOST[name], 130) for name in least)
    described = dataclasses.replace(program.description, symbols=symbols)
    bounded = dataclasses.replace(program, description=described, work=1e4)
    checks = checked(bounded, graph_of(program))
    assert all(size >= least[name] for each in checks for name, size in each["sizes"].items())
