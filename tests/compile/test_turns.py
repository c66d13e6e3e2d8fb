"""Compiled code calls what may be others' code as often, and in the order, as the program does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from warmgraph_backends.errors import BuildError
from warmgraph_backends.operators import host_layer, live_parts
from warmgraph_backends.operators.call_context import using
from warmgraph_backends.torch_api import compiling, tracing, turns

WIDTH = 64
Streams = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def layer(x: torch.Tensor, path: str) -> torch.Tensor:
    result: torch.Tensor = host_layer.OPERATOR(x, path, WIDTH, "")
    return result


def part(x: torch.Tensor, path: str) -> torch.Tensor:
    return live_parts.HostPart(path, "contiguous")(x)


def norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (WIDTH,))


def two_streams(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As a block of video and audio: each by itself, then each with the other."""
    x = x + part(norm(x), "x own")
    x = x + part(norm(x), "x text")
    y = y + part(norm(y), "y own")
    y = y + part(norm(y), "y text")
    a, b = norm(x), norm(y)
    x = x + layer(a + b, "b to a")
    y = y + layer(b - a, "a to b")
    y = y + layer(torch.nn.functional.gelu(layer(norm(y), "y up")), "y down")
    return y, x


def late_results(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What is called first is needed last."""
    first, second = layer(x * 2, "first"), layer(y * 3, "second")
    third = part(torch.tanh(y), "third")
    return third + x, second * third, first + second


def unused(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    layer(x, "before")
    result = layer(y, "used")
    layer(result, "after")
    return (result + x,)


def twice(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return layer(x, "same") + layer(x, "same"), layer(y, "other"), layer(x, "same")


PROGRAMS = {
    two_streams: ["x own", "x text", "y own", "y text", "b to a", "a to b", "y up", "y down"],
    late_results: ["first", "second", "third"],
    unused: ["before", "used", "after"],
    twice: ["same", "same", "other", "same"],
}
#: Of which Inductor would make another order, or fewer calls, if nobody told it.
MOVED = [two_streams, late_results]


class Program(torch.nn.Module):
    def __init__(self, compute: Streams) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.compute(x, y)


class Counting(torch.nn.Module):
    """A block whose parts count their calls together: what each gives hangs on how many came
    before.
    """

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def get_submodule(self, target: str) -> Any:
        def called(x: torch.Tensor) -> torch.Tensor:
            self.calls.append(target)
            return x * len(self.calls)

        return called


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = (torch.Generator().manual_seed(seed) for seed in (rows, rows + 1))
    x, y = (torch.randn(2, rows, WIDTH, generator=each) for each in made)
    return x, y


def compiled(compute: Streams) -> Callable[[list[Any]], Any]:
    rows = torch.export.Dim("rows", min=2, max=1024)
    sizes = ({1: rows}, {1: rows})
    with torch.no_grad(), tracing.size_oblivious():
        program = torch.export.export(
            Program(compute), inputs(5), dynamic_shapes=sizes, strict=False
        ).graph_module
        turns.give(program.graph)
        module, source = compiling.compile_wrapper(program, compiling.CONFIG)
    assert turns.are_kept(source, program.graph)
    call: Callable[[list[Any]], Any] = module.call
    return call


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """Those of the parts of the block that is computed."""
    found: list[str] = []
    with using(module=Counting(found)), torch.no_grad():
        yield found


@pytest.mark.parametrize("compute", PROGRAMS, ids=lambda each: each.__name__)
def test_all_calls_are_made_in_the_order_of_the_program(calls: list[str], compute: Streams) -> None:
    call = compiled(compute)
    for rows in (2, 7):
        calls.clear()
        expected = compute(*inputs(rows))
        assert calls == PROGRAMS[compute]
        calls.clear()
        ours = call(list(inputs(rows)))
        assert calls == PROGRAMS[compute]
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("compute", MOVED, ids=lambda each: each.__name__)
def test_a_graph_that_would_call_in_another_order_is_refused(
    monkeypatch: pytest.MonkeyPatch, compute: Streams
) -> None:
    monkeypatch.setattr(turns, "chain", lambda nodes: nodes)
    with pytest.raises(BuildError, match="in another order than ComfyUI"):
        compiled(compute)


def test_calls_hold_no_memory_for_each_other() -> None:
    """What a call gave is let go where it was read last, not where the next call comes."""

    def chain_of_sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = layer(x, "first").sum()
        return first + layer(y, "second").sum(), first

    program = torch.export.export(Program(chain_of_sums), inputs(5), strict=False).graph_module
    turns.give(program.graph)
    _, source = compiling.compile_wrapper(program, compiling.CONFIG)
    call = source[source.index("def call(") :]
    assert call.index("del buf1") < call.index("'second'")
