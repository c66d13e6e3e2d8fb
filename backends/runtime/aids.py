"""Kinds at no place of a model: their graphs compute what the layers do that other graphs call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..choices.choices import Choices
from ..contract import Description
from ..families import int8_product
from ..graphs.graph import Graph
from ..host_api import formats
from ..operators import host_layer
from ..reasons import Reason
from .kind import Kind


def aids_of(
    kinds: Sequence[Kind],
    device: torch.device,
    dtype: torch.dtype,
    graph_of: Callable[[Description], Graph],
    choices: Choices,
    why_not: Callable[[str], Reason | None],
) -> list[Kind]:
    """Return those that help a model's kinds, their graphs offered to what may choose them. Nothing
    waits for such a graph: until it is there, and without it, something else computes the same.

    Args:
        kinds: the model's, with their places.
        dtype: in which its operators compute.
        graph_of, why_not: as of `describe_kinds`.
        choices: what chooses.
    """
    products, label = choices.products, int8_product.LABEL
    if products is None or why_not(label) is not None or not int8_product.is_for(device):
        return []
    if not any(map(_has_int8_products, kinds)):
        return []
    graph = graph_of(int8_product.describe(dtype, device.type))
    products.own.offer(device.type, dtype, graph)
    return [Kind(label, graph=graph)]


def _has_int8_products(kind: Kind) -> bool:
    """Whether the graph of a kind calls layers that multiply by int8 weights."""
    if kind.graph is None:
        return False
    paths = list(host_layer.paths(kind.graph.description.module))
    layers = (place.module.get_submodule(path) for place in kind.places for path in paths)
    known = (formats.of(layer) for layer in layers)
    return any(form is not None and form.quantises_rows for form in known)
