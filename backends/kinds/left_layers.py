"""The layers that a region's graph leaves to the host, counted in words: for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ..host_api.layers import (
    better_files,
    multiplies_as_stored,
    quantised_as,
    quick_files,
    unpacks_quantised,
    unpacks_stored,
)
from .host_layer import NORMS, paths, rounded_paths
from .packs import is_known, owner_of


def count(module: torch.nn.Module, description: dict[str, Any]) -> Counter[tuple[str, str]]:
    """Count layers of a live module by what they are and how they compute, in words: those that are
    the host's, and those that multiply by weights that are unpacked at each call.

    Args:
        description: of the module as a graph has it.
    """
    found: Counter[tuple[str, str]] = Counter()
    rounded, left = set(rounded_paths(description)), set(paths(description))
    there = dict(module.named_modules())
    for path in sorted(left & there.keys()):  # another node may have taken one away since
        layer = there[path]
        what = "norms" if isinstance(layer, NORMS) else "products"
        found[what, _why(layer, path in rounded)] += 1
    unpacked = [
        layer
        for path, layer in there.items()
        if path not in left and isinstance(layer, torch.nn.Linear) and unpacks_stored(layer)
    ]
    if unpacked:
        found["unpacked", f"weights in fp8{_better(quick_files())}"] = len(unpacked)
    return found


def _why(layer: torch.nn.Module, is_rounded: bool) -> str:
    form = quantised_as(layer)
    if form is not None:
        return f"quantised, {form}: {_product(layer, is_rounded)}"
    if multiplies_as_stored(layer):
        return "weights in fp8, multiplied as they are"
    weight = getattr(layer, "weight", None)
    if type(weight) not in (torch.nn.Parameter, torch.Tensor, type(None)):
        return f"the weight is a {type(weight).__name__}{_better(quick_files())}"
    if is_known(type(layer).__module__):
        return "plain weights in a quantised file"
    return f"{type(layer).__qualname__.rpartition('<locals>.')[2]} of {owner_of(type(layer))}"


def _product(layer: torch.nn.Module, is_rounded: bool) -> str:
    """How a quantised layer multiplies, and which files would be quicker where it does not."""
    if others := better_files(layer):
        return f"this device unpacks it at each call{_better(others)}"
    if unpacks_quantised(layer):
        return "unpacked at each call, for its file asks for full precision"
    if is_rounded:
        return "multiplied as it is, by what is rounded within the graph"
    return "multiplied as it is"


def _better(files: Sequence[str]) -> str:
    return f"; {' or '.join(files)} files are multiplied as they are" if files else ""
