"""Which layers of one input become one operator: those between which nothing can be noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.operators import head_rotation, host_attention, host_layer, live_parts
from warmgraph_backends.worker.joined import join_layers
from warmgraph_tools.inprocess import Host

WIDTH = 32


def layer(x: torch.Tensor, path: str, act: str = "", width: int = WIDTH) -> torch.Tensor:
    result: torch.Tensor = host_layer.OPERATOR(x, path, width, act)
    return result


class Traced(torch.nn.Module):
    """What a function computes of `x` and `y`, both `[2, 3, WIDTH]`."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.compute(x, y)


def joined(compute: Callable[..., Any]) -> list[Any]:
    """The paths of the layers in the order in which they are called; of those at once, a list."""
    x, y = (torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    with torch.no_grad():
        made = torch.export.export(Traced(compute), (x, y), strict=False).graph_module
        expected = made(x.clone(), y.clone())
        join_layers(made)
        made.graph.lint()
        for mine, theirs in zip(made(x, y), expected, strict=True):
            assert torch.equal(mine, theirs)
    nodes = [n for n in made.graph.nodes if n.target in (host_layer.OPERATOR, host_layer.SEVERAL)]
    return [node.args[1] for node in nodes]


def test_layers_of_one_input_are_one_at_the_first_ones_place() -> None:
    def attention(x: torch.Tensor, y: torch.Tensor) -> Any:
        q = torch.nn.functional.rms_norm(layer(x, "q"), (WIDTH,))
        k, v = layer(x, "k", width=16), layer(x, "v", width=48)
        return q, k, v, layer(y, "out")

    assert joined(attention) == [["q", "k", "v"], "out"]


def test_inputs_and_activations_tell_them_apart(host: Host) -> None:
    def cross(x: torch.Tensor, y: torch.Tensor) -> Any:
        return layer(x, "q"), layer(y, "k"), layer(y, "v"), layer(x, "gate")

    assert joined(cross) == ["q", ["k", "v"], "gate"]

    def activated(x: torch.Tensor, y: torch.Tensor) -> Any:
        acts = ("", "gelu_tanh", "gelu_tanh", "")
        return tuple(layer(x, str(n), act) for n, act in enumerate(acts))

    assert joined(activated) == ["0", ["1", "2"], "3"]


def attend(x: torch.Tensor) -> torch.Tensor:
    return host_attention.opaque(None, x, x, x, 1)


def part(x: torch.Tensor) -> torch.Tensor:
    return live_parts.HostPart("ffn", "contiguous")(x)


def rounded(x: torch.Tensor) -> torch.Tensor:
    values = x.to(torch.float8_e4m3fn)
    result: torch.Tensor = host_layer.ROUNDED(values, None, "rounded", WIDTH, "float32")
    return result


def written(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1.0)


@pytest.mark.parametrize("between", [attend, part, rounded, written])
def test_nothing_is_called_or_written_between_them(host: Host, between: Callable[..., Any]) -> None:
    def calls(x: torch.Tensor, y: torch.Tensor) -> Any:
        first = layer(x, "q")
        return first, between(y), layer(x, "k"), layer(x, "v")

    assert joined(calls) == ["q", ["k", "v"]]

    def of_the_same(x: torch.Tensor, y: torch.Tensor) -> Any:
        x = x + y
        first = layer(x, "q")
        return first, between(x).sum(), layer(x, "k")

    assert joined(of_the_same) == ["q", "k"]


def test_what_calls_our_own_code_may_stand_between() -> None:
    def rotated(x: torch.Tensor, y: torch.Tensor) -> Any:
        q, k = (layer(x, path)[:, :, None].contiguous() for path in "qk")
        table, scale = torch.zeros(1, 3, 1, WIDTH // 2, 2, 2), torch.ones(WIDTH)
        both = head_rotation.OPERATOR(q, k, table, scale, scale, 1e-6, True)
        return *both, layer(x, "v")

    assert joined(rotated) == [["q", "k", "v"]]


def test_one_that_is_called_twice_is_called_twice() -> None:
    def twice(x: torch.Tensor, y: torch.Tensor) -> Any:
        return layer(x, "q"), layer(x, "k"), layer(x, "q")

    assert joined(twice) == [["q", "k", "q"]]
