"""What several products multiply, rounded once: a pass over what Inductor is about to lower."""

from __future__ import annotations

from typing import Any

import torch

from ..operators import host_layer
from ..torch_api import compiling

aten: Any = torch.ops.aten
Node = Any  # torch.fx.Node, whose arguments may be of any type

_ROUNDING = (
    torch.ops.prims.convert_element_type.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
)


def round_once(graph: torch.fx.Graph) -> None:
    """Let layers of the host's that round the same input, such as queries, keys and values, read
    what was rounded once: Inductor would write it for each.

    Args:
        graph: functional, as Inductor has it after its own patterns; changed.
    """
    readers: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if node.target is host_layer.ROUNDED:
            readers.setdefault(_rounding(node.args[0]), []).append(node)
    for first, *others in readers.values():
        values = first.args[0]
        for node in others:
            node.replace_input_with(node.args[0], values)
        if others:
            compiling.keep(values)
            graph.eliminate_dead_code()


def _rounding(values: Node) -> tuple[Any, ...]:
    """What is rounded, and by which steps."""
    steps: list[Any] = []
    while calls(values, *_ROUNDING):
        steps.append((values.target, values.args[1:]))
        values = values.args[0]
    return (values, *steps)


def calls(node: Any, *targets: Any) -> bool:
    """Whether a value is what one of these operators gives."""
    return isinstance(node, torch.fx.Node) and node.target in targets
