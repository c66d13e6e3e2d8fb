"""Which attention kernel a graph of fixed sizes calls: cuDNN's, where it is measurably quicker.

The host's own order takes flash attention first, and a graph for any size keeps to it: cuDNN makes
a plan for each new shape, some 65 ms of the processor in every process. At a hot size its kernels
save up to 40 % of a long self-attention; for a short one the plan would not be earned back.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

#: What a call must save for cuDNN's plan to be worth its time within a few images.
MIN_SAVED_US = 10.0
_CALLS = 10
_REPLAYS = 7


def choose(graph_module: torch.fx.GraphModule) -> int:
    """Measure each attention of an exported graph on the GPU and let it call the quicker kernel.

    Returns:
        How many call cuDNN's.
    """
    chosen = 0
    known: dict[Any, bool] = {}
    for node in list(graph_module.graph.nodes):
        if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
            continue
        tensors = [argument.meta["val"] for argument in node.args[:3]]
        shapes = tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)
        if any(_options(node)) or not _is_plain(shapes):
            continue
        if shapes not in known:
            known[shapes] = _is_quicker(shapes)
        if known[shapes]:
            _call_cudnn(graph_module.graph, node)
            chosen += 1
    if chosen:
        graph_module.recompile()
    return chosen


def _options(node: torch.fx.Node) -> list[Any]:
    """What the call asks for besides its three tensors: a mask, dropout, causality, a scale."""
    return [*node.args[3:], *node.kwargs.values()]


def _is_plain(shapes: Any) -> bool:
    sizes = [n for shape, strides, _ in shapes for n in (*shape, *strides)]
    halves = all(dtype in (torch.float16, torch.bfloat16) for _, _, dtype in shapes)
    return halves and all(isinstance(n, int) for n in sizes)


def _is_quicker(shapes: Any) -> bool:
    """Whether cuDNN takes these shapes and saves enough."""
    q, k, v = (
        torch.empty_strided(shape, strides, dtype=dtype, device="cuda").normal_()
        for shape, strides, dtype in shapes
    )
    try:
        with torch.no_grad():
            flash, cudnn = (_microseconds(run, q, k, v) for run in (_flash, _cudnn))
    except RuntimeError:  # one of them refuses the shape or this GPU
        return False
    return flash - cudnn >= MIN_SAVED_US


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, False)[0]


def _microseconds(run: Callable[..., Any], *tensors: torch.Tensor) -> float:
    """The GPU's time of one call, without the processor's part."""
    run(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            run(*tensors)
    graph.replay()
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(_REPLAYS):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000.0 / _CALLS)
    graph.reset()
    return statistics.median(times)


def _call_cudnn(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    with graph.inserting_before(node):
        both = graph.call_function(
            torch.ops.aten._scaled_dot_product_cudnn_attention.default,
            (*node.args[:3], None, False),
        )
        result = graph.call_function(operator.getitem, (both, 0))
    result.meta.update(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
