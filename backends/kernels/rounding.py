"""Where a graph rounds: passes before Inductor lowers it.

An input of several products is rounded once. Where the host bounds overflows of float16, each
operator's result is rounded as in eager, so that it is infinite where eager's is.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch

from ..operators import host_layer
from ..operators.registering import NAMESPACE
from ..torch_api import compiling

aten: Any = torch.ops.aten
Node = Any  # torch.fx.Node, whose arguments may be of any type

_ROUNDING = (
    torch.ops.prims.convert_element_type.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
)


#: By which an infinity or NaN becomes a finite number, other than the one that a number beyond
#: float16 would become. All others keep an overflow what it is, to a graph's results.
_BOUNDS = frozenset(
    getattr(aten, name)
    for name in (
        *("nan_to_num", "nan_to_num_", "isnan", "isinf", "isfinite", "isposinf", "isneginf"),
        *("clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "clip"),
        *("where", "masked_fill", "masked_fill_", "minimum", "maximum", "fmin", "fmax"),
        *("eq", "ne", "lt", "le", "gt", "ge", "sign", "sgn", "amax", "amin", "max", "min"),
        *("reciprocal", "rsqrt", "pow", "tanh", "sigmoid", "exp", "exp2", "erf", "atan"),
        *("softmax", "_softmax", "hardtanh", "hardsigmoid", "linalg_vector_norm"),
    )
)
_DIVISIONS = (aten.div, aten.div_)
#: What they read and give lies in memory, rounded.
_IN_MEMORY = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution)
#: What such are made of in a graph as exported.
_BECOMING = (aten.linear, aten.matmul, aten.conv1d, aten.conv2d, aten.conv3d)
#: Which compute nothing, besides views.
_MOVES = (aten._unsafe_view.default, aten.clone.default, aten.cat.default, operator.getitem)
#: Inductor's mark of an operator that rounds what it reads and gives (`emulate_precision_casts`).
_ROUNDS = "low_precision_pointwise_barrier"


def may_bound_overflows(graph: torch.fx.Graph) -> bool:
    """Whether an overflow of float16 may become finite again in this exported graph, apart from
    values in memory, which are rounded anyway.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return any(map(_is_half, graph.nodes)) and any(map(_may_bound, nodes))


def _may_bound(node: Node) -> bool:
    if not any(_is_half(each) and not _lies_in_memory(each) for each in node.all_input_nodes):
        return False
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _DIVISIONS:
        return isinstance(node.args[1], torch.fx.Node)
    return packet in _BOUNDS


def _lies_in_memory(node: Node) -> bool:
    """Whether a node's result in an exported graph is read from memory, whole or in part."""
    while _is_view(node):
        node = node.args[0]
    is_product = getattr(node.target, "overloadpacket", None) in _BECOMING
    return node.op != "call_function" or is_product or _is_called(node)


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return calls(node, operator.getitem) or (
        schema is not None
        and any(each.alias_info and not each.alias_info.is_write for each in schema.returns)
    )


def _is_half(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.float16


def round_all(graph: torch.fx.Graph) -> None:
    """Have each operator read rounded numbers, also composed operators.

    Inductor rounds inputs and results of elementwise operators; this does the same for sums, views
    and the like, which are not torch's own operators any more.

    Args:
        graph: as in `round_once`, compiled with `ROUNDING_CONFIG`; changed.
    """
    round_once(graph)
    rounded_before: set[Node] = set()
    for node in list(graph.nodes):
        if _is_rounded(node, rounded_before):
            rounded_before.add(node)
            continue
        if not _is_half(node):
            continue
        readers = [user for user in node.users if not _reads_rounded(user)]
        if not readers:
            continue
        with graph.inserting_after(node):
            rounded = graph.call_function(aten.mul.Tensor, (node, 1.0))
        rounded.meta.update(val=node.meta["val"])
        rounded.meta[_ROUNDS] = True
        for user in readers:
            user.replace_input_with(node, rounded)


def _is_rounded(node: Node, before: Collection[Node]) -> bool:
    """Whether a node's result is rounded wherever it is read, like its inputs."""
    if node.op != "call_function" or _is_called(node):
        return True
    if _is_view(node) or calls(node, *_MOVES):
        tensors = (each for each in node.all_input_nodes if not _is_size(each))
        return all(each in before for each in tensors)
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return is_pointwise and not calls(node, aten.addcmul.default)


def _is_size(node: Node) -> bool:
    return not isinstance(node.meta.get("val"), torch.Tensor | list | tuple)


def _reads_rounded(node: Node) -> bool:
    return node.op == "output" or _ROUNDS in node.meta or _is_called(node)


def _is_called(node: Node) -> bool:
    """Whether an operator reads and writes memory, by code that is not Inductor's."""
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(node.target, "namespace", "") == NAMESPACE or packet in _IN_MEMORY


def round_once(graph: torch.fx.Graph) -> None:
    """Let host layers that round the same input, such as queries, keys and values, share one
    rounded copy: Inductor would write one for each.

    Args:
        graph: functional, as after Inductor's own patterns; changed.
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
    """The value that is rounded, and the steps of rounding."""
    steps: list[Any] = []
    while calls(values, *_ROUNDING):
        steps.append((values.target, values.args[1:]))
        values = values.args[0]
    return (values, *steps)


def calls(node: Any, *targets: Any) -> bool:
    """Whether a value is the result of one of these operators."""
    return isinstance(node, torch.fx.Node) and node.target in targets
