"""Products by weights as the GPU is quicker with them: two by one kernel, or onto a sum in place.

`pair` changes an exported graph of fixed sizes, before it is compiled; `finish` what Inductor is
about to lower.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..contract import Measure
from ..torch_api import compiling, tracing
from .gpu_time import accepted, compare
from .rounding import calls, round_once

aten: Any = torch.ops.aten
Node = Any  # torch.fx.Node, whose arguments may be of any type

#: More rows fill the GPU by one weight alone.
FEW_ROWS = 512
#: What `twin_product` computes whole blocks of.
MULTIPLE = 64
_MUST_SAVE_US = 1.0  # per pair
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def pair(graph_module: torch.fx.GraphModule, measure: Measure) -> int:
    """Let two products of the same few rows, such as a text's keys and values, be computed by one
    kernel, where the GPU is quicker with it.

    Args:
        measure: held while kernels are timed, not while they are compiled.

    Returns:
        How many pairs there are.
    """
    found = 0
    known: dict[Any, bool] = {}
    for first, second in _pairs(graph_module.graph):
        source, weight = (argument.meta["val"] for argument in first.args[:2])
        shapes = (tuple(source.shape), tuple(weight.shape), source.dtype)
        if shapes not in known:
            known[shapes] = _is_quicker(shapes, measure)
        if known[shapes]:
            _call_once(graph_module.graph, first, second)
            found += 1
    if found:
        graph_module.recompile()
    return found


def _pairs(graph: torch.fx.Graph) -> list[tuple[Node, Node]]:
    """Products of the same rows by two weights alike, each product in one pair at most."""
    if not compiling.launches_own_kernels():
        return []
    alone: dict[Any, Node] = {}
    pairs = []
    for node in graph.nodes:
        if node.target is not aten.linear.default or not _suits_twin(node):
            continue
        key = (node.args[0], tuple(node.args[1].meta["val"].shape))
        other = alone.pop(key, None)
        if other is None or other.args[1] is node.args[1]:
            alone[key] = node
        else:
            pairs.append((other, node))
    return pairs


def _suits_twin(node: Node) -> bool:
    """Whether `twin_product` is made for a product such as this."""
    if len(node.args) != 2 or node.kwargs:  # it has a bias
        return False
    source, weight = (argument.meta["val"] for argument in node.args)
    sizes = (*source.shape, *weight.shape)
    return (
        all(isinstance(n, int) for n in sizes)
        and source.dtype == weight.dtype
        and source.dtype in (torch.float16, torch.bfloat16)
        and source.is_contiguous()
        and weight.is_contiguous()
        and 0 < math.prod(source.shape[:-1]) <= FEW_ROWS
        and all(n % MULTIPLE == 0 for n in weight.shape)
        and node.args[1].op == "placeholder"
    )


def _is_quicker(shapes: Any, measure: Measure) -> bool:
    times = compare(_runs(*shapes), measure)
    return len(times) == 2 and times["apart"] - times["twin"] >= _MUST_SAVE_US


def _runs(
    source: tuple[int, ...], weight: tuple[int, int], dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    """Calls of both forms on this GPU, by name, each made once; what it refuses is not there."""
    from .twin_product import OPERATOR

    def apart(rows: torch.Tensor, *weights: torch.Tensor) -> Any:
        return [torch.nn.functional.linear(rows, weight) for weight in weights]

    with contextlib.suppress(torch.OutOfMemoryError), torch.no_grad():
        rows = torch.randn(source, dtype=dtype, device="cuda")
        one = torch.randn(weight, dtype=dtype, device="cuda")
        # In an image each weight comes from memory: what was used last would be in the cache.
        cache = torch.cuda.get_device_properties(rows.device).L2_cache_size
        count = 2 * math.ceil(cache / one.nbytes) + 2
        weights = [one, *(one.clone() for _ in range(count - 1))]
        calls: dict[str, Callable[..., Any]] = {"apart": apart, "twin": OPERATOR}
        return accepted({name: _in_turn(call, rows, weights) for name, call in calls.items()})
    return {}


def _in_turn(
    call: Callable[..., Any], rows: torch.Tensor, weights: list[torch.Tensor]
) -> Callable[[], Any]:
    turns = itertools.cycle(zip(weights[::2], weights[1::2], strict=False))
    return lambda: call(rows, *next(turns))


def _call_once(graph: torch.fx.Graph, first: Node, second: Node) -> None:
    from .twin_product import OPERATOR

    with graph.inserting_before(first):
        both = graph.call_function(OPERATOR, (*first.args, second.args[1]))
        results = [graph.call_function(operator.getitem, (both, n)) for n in range(2)]
    for node, result in zip((first, second), results, strict=True):
        result.meta.update(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


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
    """What suits a GPU: `round_once` and `add_in_place`."""
    round_once(graph)
    add_in_place(graph)


def add_in_place(graph: torch.fx.Graph) -> None:
    """Let a product that is added to another sum, and returned, be added by the product's own
    kernel, onto that sum where it lies: otherwise one more kernel reads both and writes a third.

    The product's bias goes to the sum, which is being computed anyway.

    Args:
        graph: functional, as Inductor has it after its own patterns; changed. What changes memory
            is a sum that nothing else reads.
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
    """The product that nothing but this term, a view of it, reads."""
    flat = term
    while calls(flat, *_VIEWS) and len(flat.users) == 1:
        flat = flat.args[0]
    if not calls(flat, aten.addmm.default, aten.add.Tensor) or len(flat.users) > 1 or flat.kwargs:
        return None
    if flat.target is aten.addmm.default:
        bias, *factors = flat.args
    else:  # Inductor takes a bias out of its product where it may be added elsewhere
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
        and _are_equal(result.meta["val"].shape[-1:], (product.columns,))
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
    return isinstance(value, torch.Tensor) and _are_equal(value.shape, shape)


def _are_equal(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether sizes are known to be equal: to ask whether symbols are would narrow what they may
    be.
    """
    return len(sizes) == len(others) and all(
        tracing.is_surely(a == b) for a, b in zip(sizes, others, strict=True)
    )


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
