"""Joins layers of one input into one operator: a pass over the exported program.

Queries, keys and values are products of the same rows, which must be rotated and quantised for int8
weights, but only once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch

from ..operators import host_layer
from ..torch_api import tracing, turns

Node = Any  # torch.fx.Node, whose arguments may be of any type


def join_layers(graph_module: torch.fx.GraphModule) -> None:
    """Join host layers that take one input into one operator, at the first one's place.

    Whether a layer is another pack's code is known only when a graph runs. So layers are joined
    only if nothing between them may be others' code or writes: the order of calls stays.

    Args:
        graph_module: exported; changed.
    """
    for nodes in list(_sets(graph_module.graph)):
        _join(graph_module.graph, nodes)
    graph_module.recompile()


def _sets(graph: torch.fx.Graph) -> Iterator[list[Node]]:
    """The layers of one input and one activation that may be joined."""
    found: list[Node] = []
    for node in graph.nodes:
        is_layer = node.target is host_layer.OPERATOR
        if is_layer and (not found or _taken(node) == _taken(found[0])):
            found.append(node)
        elif is_layer or _may_be_noticed(node):
            if len(found) > 1:
                yield found
            found = [node] if is_layer else []
    if len(found) > 1:
        yield found


def _taken(layer: Node) -> tuple[Any, str]:
    """The input of a layer and the activation before it."""
    input, _, _, act = layer.args
    return input, act


def _may_be_noticed(node: Node) -> bool:
    """Whether a node may call others' code, or changes what others read."""
    return node.op == "call_function" and (
        turns.is_taken_by(node.target) or tracing.may_write(node.target)
    )


def _join(graph: torch.fx.Graph, layers: list[Node]) -> None:
    input, act = _taken(layers[0])
    _, paths, widths, _ = (list(each) for each in zip(*(n.args for n in layers), strict=True))
    with graph.inserting_before(layers[0]):
        whole = graph.call_function(host_layer.SEVERAL, (input, paths, widths, act))
        results = [graph.call_function(operator.getitem, (whole, n)) for n in range(len(layers))]
    whole.meta["val"] = [layer.meta["val"] for layer in layers]
    for layer, result in zip(layers, results, strict=True):
        result.meta = dict(layer.meta)
        layer.replace_all_uses_with(result)
        graph.erase_node(layer)
