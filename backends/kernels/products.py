"""Products by weights that are added to a sum in place, which is faster on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..torch_api import compiling, tracing
from .rounding import calls, round_once

aten: Any = torch.ops.aten
Node = Any  # torch.fx.Node, whose arguments may be of any type

_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


class _Product(NamedTuple):
    """`matrix @ weight + bias`, in two dimensions, with a bias for each column."""

    bias: Node
    matrix: Node
    weight: Node
    flat: Node
    term: Node  # the same in the form in which it is added

    @property
    def columns(self) -> Any:
        return self.flat.meta["val"].shape[1]


def finish(graph: torch.fx.Graph) -> None:
    """The last passes for a GPU: `round_once` and `add_in_place`."""
    round_once(graph)
    add_in_place(graph)


def add_in_place(graph: torch.fx.Graph) -> None:
    """Let a product that is added to another sum, and returned, be added by the product's own
    kernel, in place onto that sum: otherwise another kernel reads both and writes a third.

    The product's bias goes to the sum, which is being computed anyway.

    Args:
        graph: functional, as after Inductor's own patterns; changed. Only a sum that nothing else
            reads is overwritten.
    """
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or not _is_returned(node):
            continue
        for term, total in (node.args, node.args[::-1]):
            product = _product(term)
            if product is not None and _can_become(total, product, node):
                _add_onto(graph, total, product, node)
                break


def _is_returned(node: Node) -> bool:
    """Whether a graph's caller reads a value, and nothing else does."""
    return bool(node.users) and all(
        user.op == "output" or (user.target in _VIEWS and _is_returned(user)) for user in node.users
    )


def _product(term: Any) -> _Product | None:
    """The product that is read only by this term, a view of it."""
    flat = term
    while calls(flat, *_VIEWS) and len(flat.users) == 1:
        flat = flat.args[0]
    if not calls(flat, aten.addmm.default, aten.add.Tensor) or len(flat.users) > 1 or flat.kwargs:
        return None
    if flat.target is aten.addmm.default:
        bias, *factors = flat.args
    else:  # Inductor separates a bias from its product where it may be added elsewhere
        bias, product = flat.args if calls(flat.args[1], aten.mm.default) else flat.args[::-1]
        if not calls(product, aten.mm.default) or len(product.users) > 1:
            return None
        if not _are_alike(product, flat):
            return None
        factors = product.args
    found = _Product(bias, factors[0], factors[1], flat, term)
    return found if _has_shape(bias, (found.columns,)) else None


def _can_become(total: Any, product: _Product, result: Node) -> bool:
    """Whether a sum of this graph has the form of the result, and of what is added to it; the last
    dimension of all is the product's columns.
    """
    return (
        calls(total, aten.add.Tensor)
        and tracing.are_surely_equal(result.meta["val"].shape[-1:], (product.columns,))
        and _are_alike(total, product.term, result)
        and all(node.meta["val"].is_contiguous() for node in (total, product.term, result))
    )


def _are_alike(*nodes: Node) -> bool:
    """Whether tensors have one shape and one dtype."""
    first: torch.Tensor = nodes[0].meta["val"]
    return all(
        node.meta["val"].dtype == first.dtype and _has_shape(node, first.shape) for node in nodes
    )


def _has_shape(node: Any, shape: Sequence[Any]) -> bool:
    value = node.meta["val"] if isinstance(node, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and tracing.are_surely_equal(value.shape, shape)


def _add_onto(graph: torch.fx.Graph, total: Node, product: _Product, result: Node) -> None:
    def call(target: Any, args: tuple[Any, ...], like: Node) -> Node:
        made = graph.call_function(target, args)
        made.meta["val"] = like.meta["val"]
        return made

    compiling.call_whole(aten.addmm_.default)
    with graph.inserting_before(result):
        biased = call(aten.add.Tensor, (total, product.bias), result)
        rows = call(aten.reshape.default, (biased, [-1, product.columns]), product.flat)
        call(aten.addmm_.default, (rows, product.matrix, product.weight), product.flat)
    # Not what the operator returns: Inductor would take the sum's memory for unused after it.
    result.replace_all_uses_with(biased)
    graph.erase_node(result)
    graph.eliminate_dead_code()
