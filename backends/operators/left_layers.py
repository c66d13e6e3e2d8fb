"""The layers that a region's graph leaves to the host, counted by how they compute: for reports."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch

from ..code.packs import is_known, owner_of
from ..host_api import formats, gguf
from ..host_api.layers import multiplies_as_stored, unpacks_quantised, unpacks_stored
from ..operators.host_layer import NORMS, paths, rounded_paths


class LeftLayers(NamedTuple):
    """The common properties of such layers.

    Attributes:
        what: "norms", "products", "convolutions", "parts"; "unpacked" products are a graph's.
        how: they compute, as a key of `sessions.left_words`.
        name: of their format, of their weight's class, or of their own class and its owner.
        files: formats that the device multiplies as they are, if it does not multiply these.
    """

    what: str
    how: str
    name: str = ""
    files: tuple[str, ...] = ()


def count(module: torch.nn.Module, description: dict[str, Any]) -> Counter[LeftLayers]:
    """Count layers of a live module: those left to the host, and those whose weights are unpacked
    at each call.

    Args:
        description: of the module as a graph has it.
    """
    found: Counter[LeftLayers] = Counter()
    rounded, left = set(rounded_paths(description)), set(paths(description))
    there = dict(module.named_modules())
    for path in sorted(left & there.keys()):  # another node may have removed one since
        found[_left(there[path], path in rounded)] += 1
    unpacked = [
        layer
        for path, layer in there.items()
        if path not in left and isinstance(layer, torch.nn.Linear) and unpacks_stored(layer)
    ]
    if unpacked:
        found[LeftLayers("unpacked", "stored", files=tuple(formats.quick_files()))] = len(unpacked)
    return found


def _left(layer: torch.nn.Module, is_rounded: bool) -> LeftLayers:
    what = "norms" if isinstance(layer, NORMS) else "products"
    form = formats.of(layer)
    if form is not None:
        files = tuple(formats.better_files(layer))
        return LeftLayers(
            what, "unpacked" if files else _product(layer, is_rounded), form.name, files
        )
    if multiplies_as_stored(layer):
        return LeftLayers(what, "stored_multiplied")
    if (blocks := gguf.blocks_of(layer)) is not None:
        return LeftLayers(what, "in_blocks", f"GGUF {blocks.form}")
    weight = getattr(layer, "weight", None)
    if type(weight) not in (torch.nn.Parameter, torch.Tensor, type(None)):
        return LeftLayers(what, "packed", type(weight).__name__, tuple(formats.quick_files()))
    if is_known(type(layer).__module__):
        return LeftLayers(what, "plain")
    name = type(layer).__qualname__.rpartition("<locals>.")[2]
    return LeftLayers(what, "others", f"{name} of {owner_of(type(layer))}")


def _product(layer: torch.nn.Module, is_rounded: bool) -> str:
    """How a quantised layer multiplies if its device does not unpack it."""
    if unpacks_quantised(layer):
        return "unpacked_asked"
    return "rounded" if is_rounded else "multiplied"
