"""Which attention kernel a graph of fixed sizes calls, where attention is a part of it: the
measurably quickest there is. Blocks of the host's have none within (`host_attention`), unless it is
another pack's that no option can replace.

A graph for any size keeps to the host's order, which takes flash attention first where PyTorch has
it. cuDNN makes a plan for each new shape, some 65 ms of the processor in every process: at a hot
size its kernels save up to 40 % of a long self-attention, for a short one the plan would not be
earned back. Over a text's few keys our own kernel is the quicker one, and costs nothing
beforehand.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..contract import Measure
from ..host_api.attention import host_order
from ..torch_api import compiling
from .gpu_time import accepted, compare

#: Beyond so many keys flash attention's pipeline pays; beyond such a width a head's sums would
#: leave the registers.
FEW_KEYS = 512
WIDEST_HEAD = 128
_HOST = "host"


class Kernel(NamedTuple):
    """Another kernel than the host would call, and when it may be called instead."""

    must_save_us: float  # per call, over the host's
    takes: Callable[..., bool]  # of query, key and value
    operator: Callable[[], Any]
    arguments: tuple[Any, ...] = ()  # after query, key and value
    has_more: bool = False  # whether it returns more than the result, which comes first


def has_few_keys(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `cross_attention` is made for tensors such as these."""
    batch, heads, _, width = query.shape
    return (
        key.shape == value.shape == (batch, heads, key.shape[2], width)
        and 0 < key.shape[2] <= FEW_KEYS
        and width <= WIDEST_HEAD
        and all(tensor.stride(3) == 1 for tensor in (query, key, value))
    )


def _cross() -> Any:
    from .cross_attention import OPERATOR  # needs Triton

    return OPERATOR


KERNELS = {
    # Its plan must be worth its time within a few images.
    "cudnn": Kernel(
        10.0,
        lambda *_: True,
        lambda: torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        (None, False),
        has_more=True,
    ),
    "cross": Kernel(
        1.0,
        lambda *tensors: compiling.launches_own_kernels() and has_few_keys(*tensors),
        _cross,
    ),
}


def choose(graph_module: torch.fx.GraphModule, measure: Measure) -> int:
    """Measure each attention of an exported graph on the GPU and let it call the quickest kernel.

    Args:
        measure: held while kernels are timed, not while they are compiled.

    Returns:
        How many call another one than the host would.
    """
    chosen = 0
    known: dict[Any, str | None] = {}
    for node in list(graph_module.graph.nodes):
        if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
            continue
        tensors = [argument.meta["val"] for argument in node.args[:3]]
        shapes = tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)
        if any(_options(node)) or not _is_plain(shapes):
            continue
        if shapes not in known:
            known[shapes] = _quickest(shapes, measure)
        if (name := known[shapes]) is not None:
            _call_instead(graph_module.graph, node, KERNELS[name])
            chosen += 1
    if chosen:
        graph_module.recompile()
    return chosen


def _options(node: torch.fx.Node) -> list[Any]:
    """What the call asks for besides its three tensors: a mask, dropout, causality, a scale."""
    return [*node.args[3:], *node.kwargs.values()]


def _is_plain(shapes: Any) -> bool:
    if any(len(shape) != 4 for shape, _, _ in shapes):
        return False
    sizes = [n for shape, strides, _ in shapes for n in (*shape, *strides)]
    halves = all(dtype in (torch.float16, torch.bfloat16) for _, _, dtype in shapes)
    return halves and all(isinstance(n, int) for n in sizes)


def _quickest(shapes: Any, measure: Measure) -> str | None:
    """Name of the kernel that saves most at these shapes, if it saves enough."""
    times = compare(_runs(shapes), measure)
    if _HOST not in times:
        return None
    saved = {name: times[_HOST] - time for name, time in times.items() if name in KERNELS}
    enough = [name for name in saved if saved[name] >= KERNELS[name].must_save_us]
    return max(enough, key=saved.__getitem__, default=None)


def _runs(shapes: Any) -> dict[str, Callable[[], Any]]:
    """Calls of the kernels that take these shapes on this GPU, by name, each made once."""
    with contextlib.suppress(torch.OutOfMemoryError), torch.no_grad():
        tensors = [
            torch.empty_strided(shape, strides, dtype=dtype, device="cuda").normal_()
            for shape, strides, dtype in shapes
        ]
        takes = {name: _call(each) for name, each in KERNELS.items() if each.takes(*tensors)}
        calls = {_HOST: _as_host, **takes}
        return accepted({name: functools.partial(call, *tensors) for name, call in calls.items()})
    return {}


def _as_host(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    with host_order():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _call(kernel: Kernel) -> Callable[..., Any]:
    target = kernel.operator()
    return lambda *tensors: target(*tensors, *kernel.arguments)


def _call_instead(graph: torch.fx.Graph, node: torch.fx.Node, kernel: Kernel) -> None:
    with graph.inserting_before(node):
        result = graph.call_function(kernel.operator(), (*node.args[:3], *kernel.arguments))
        if kernel.has_more:
            result = graph.call_function(operator.getitem, (result, 0))
    result.meta.update(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
