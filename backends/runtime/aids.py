"""Kinds at no place of a model: their graphs compute what the layers do that other graphs call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

from ..choices import own_products
from ..choices.choices import Choices
from ..contract import RegionSpec
from ..families import int8_product, packed_weight
from ..graphs.compiled_graph import CompiledGraph
from ..host_api import formats, gguf
from ..kernels.packed_blocks import FORMATS
from ..operators import host_layer
from ..reasons import Reason
from .kind import Kind


def aids_of(
    kinds: Sequence[Kind],
    device: torch.device,
    dtype: torch.dtype,
    graph_of: Callable[[RegionSpec], CompiledGraph],
    choices: Choices,
    why_not: Callable[[str], Reason | None],
) -> list[Kind]:
    """Return the aids of a model's kinds, and offer their graphs to what may choose them. Nothing
    waits for such a graph: without it something else computes the same.

    Args:
        kinds: the model's, with their places.
        dtype: in which its operators compute.
        graph_of, why_not: as of `describe_kinds`.
        choices: what chooses.
    """
    if choices.products is None:
        return []
    layers = [layer for kind in kinds for layer in _called(kind)]
    aids = []
    for form, description in [*_int8(layers, device, dtype), *_packed(layers, device, dtype)]:
        if why_not(description.label) is None:
            graph = graph_of(description)
            choices.products.graphs.offer(form, device.type, graph, graph.card)
            aids.append(Kind(description.label, graph=graph))
    return aids


#: What graphs are to be, by what they are offered for.
_Wanted = Iterator[tuple[Hashable, RegionSpec]]


def _int8(layers: Sequence[torch.nn.Module], device: torch.device, dtype: torch.dtype) -> _Wanted:
    """One for int8 products."""
    known = (formats.of(layer) for layer in layers)
    if not any(form is not None and form.quantises_rows for form in known):
        return
    if int8_product.is_for(device):
        yield own_products.form_of(dtype), int8_product.describe(dtype, device.type)


def _packed(layers: Sequence[torch.nn.Module], device: torch.device, dtype: torch.dtype) -> _Wanted:
    """One for each format of weights in blocks."""
    found: dict[tuple[str, torch.dtype], None] = {}
    for blocks in filter(None, map(gguf.patched_blocks_of, layers)):
        if FORMATS[blocks.form].is_packed:
            found[blocks.form, dtype if blocks.steps is None else blocks.steps] = None
    for name, steps in found:
        yield (name, steps, dtype), packed_weight.describe(name, steps, dtype, device.type)


def _called(kind: Kind) -> Iterator[torch.nn.Module]:
    """The layers that a kind's graph calls."""
    if kind.graph is not None:
        paths = list(host_layer.paths(kind.graph.description.module))
        for place in kind.places:
            yield from map(place.module.get_submodule, paths)
