"""Passes what is added to whole channels right before a group norm to the norm's own kernels.

A convolution's bias and a timestep's embedding add one number to each channel. Adding them before
the norm's sums would write the channels once more.
"""

from __future__ import annotations

from typing import Any

import torch

from ..torch_api import compiling, tracing
from .rounding import calls

aten: Any = torch.ops.aten
Node = Any  # torch.fx.Node, whose arguments may be of any type

_CONVOLUTIONS = (aten.conv2d.default, aten.convolution.default)
_BIAS = 2  # its index among a convolution's arguments
_SIDES = (2, 3)


def sum_before_terms(graph_module: torch.fx.GraphModule) -> int:
    """Let each norm sum up a convolution's result directly, with what is added to its channels as
    an argument.

    Args:
        graph_module: exported, before it is compiled; changed.

    Returns:
        How many norms were changed.
    """
    if not compiling.launches_own_kernels():
        return 0
    from .group_moments import OPERATOR

    graph = graph_module.graph
    found = 0
    for node in list(graph.nodes):
        if node.target is OPERATOR:
            found += _take_addend(graph, node) | _take_bias(graph, node)
    if found:
        graph_module.recompile()
    return found


def _take_addend(graph: torch.fx.Graph, norm: Node) -> bool:
    """Take a term for each channel of each image out of what is summed."""
    images, addend, *others = norm.args
    if addend is not None or not calls(images, aten.add.Tensor) or images.kwargs:
        return False
    for values, term in (images.args, images.args[::-1]):
        if _is_like(values, images) and _is_per_channel(term, images):
            with graph.inserting_before(norm):
                flat = graph.call_function(aten.squeeze.dims, (term, list(_SIDES)))
            flat.meta["val"] = aten.squeeze.dims(term.meta["val"], list(_SIDES))
            norm.args = (values, flat, *others)
            return True
    return False


def _take_bias(graph: torch.fx.Graph, norm: Node) -> bool:
    """Take a convolution's bias out of what is summed."""
    images, addend, added, *others = norm.args
    if added is not None or not calls(images, *_CONVOLUTIONS) or len(images.args) <= _BIAS:
        return False
    bias = images.args[_BIAS]
    if bias is None:
        return False
    before, after = images.args[:_BIAS], images.args[_BIAS + 1 :]
    with graph.inserting_before(images):
        plain = graph.call_function(images.target, (*before, None, *after), images.kwargs)
        column = graph.call_function(aten.view.default, (bias, [1, -1, 1, 1]))
        whole = graph.call_function(aten.add.Tensor, (plain, column))
    plain.meta["val"] = whole.meta["val"] = images.meta["val"]
    column.meta["val"] = aten.view.default(bias.meta["val"], [1, -1, 1, 1])
    norm.args = (plain, addend, bias, *others)
    images.replace_all_uses_with(whole)
    graph.erase_node(images)
    return True


def _is_like(node: Any, images: Node) -> bool:
    """Whether a value has the images' dtype and sizes, channels-last."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    whole = images.meta["val"]
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == whole.dtype
        and tracing.are_surely_equal(value.shape, whole.shape)
        and tracing.is_by_channels(value)
    )


def _is_per_channel(node: Any, images: Node) -> bool:
    """Whether a value is one number for each channel of each image, adjacent in memory."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != images.meta["val"].dim():
        return False
    wanted = (*images.meta["val"].shape[:2], 1, 1)
    return tracing.are_surely_equal(value.shape, wanted) and tracing.is_surely(value.stride(1) == 1)
