"""A layer that a region leaves to the host: one operator in its graph, which calls the live layer.

Its weights are no plain tensors (quantised, packed), or its code is another pack's. What lies
around it is compiled, and it stays whatever it is: format, LoRA, place in memory.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from ..host_api.layers import better_files, quantised_as
from . import operators
from .packs import is_known, owner_of

#: What stands for the class of such a layer in a description.
CLASS = "the host's layer"
#: By which the stand-in of a layer goes through its input's features.
_PRIMES = (7919, 104729)
_NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm)


class Caller(Protocol):
    """Calls a layer, in a quicker way where it knows one (`RotatedProducts`)."""

    def call(self, layer: torch.nn.Module, input: torch.Tensor) -> torch.Tensor:
        """Return what `layer(input)` would."""


class _Thread(threading.local):
    def __init__(self) -> None:
        #: The module of the region that is computed; None where there is none, in a worker.
        self.module: torch.nn.Module | None = None
        #: What calls its layers; None leaves that to the operator.
        self.caller: Caller | None = None


@contextlib.contextmanager
def layers_of(module: torch.nn.Module, caller: Caller | None = None) -> Iterator[None]:
    """Until this ends, let the operator call the layers of this module, by a caller."""
    before = _thread.module, _thread.caller
    _thread.module, _thread.caller = module, caller
    try:
        yield
    finally:
        _thread.module, _thread.caller = before


class HostLayer(torch.nn.Module):
    """Stands in a twin for a layer that is the host's: `[..., in] -> [..., out]`."""

    def __init__(self, path: str, in_features: int, out_features: int) -> None:
        """Args: where the layer is in the region's module; its widths."""
        super().__init__()
        self.path, self.in_features, self.out_features = path, in_features, out_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = OPERATOR(input, self.path, self.out_features)
        return result


def widths(layer: torch.nn.Module) -> tuple[int, int] | None:
    """Return the widths of a layer that computes a product or, twice the same, a norm over the last
    axis, whosever class it is; None for any other.
    """
    if isinstance(layer, _NORMS):  # packs bring theirs along with their products
        return (layer.normalized_shape * 2)[:2] if len(layer.normalized_shape) == 1 else None
    found = tuple(getattr(layer, name, None) for name in ("in_features", "out_features"))
    named = type(layer).__name__.endswith("Linear") or isinstance(layer, torch.nn.Linear)
    return found if named and all(type(width) is int for width in found) else None  # type: ignore[return-value]


def describe(path: str, layer: torch.nn.Module) -> dict[str, Any] | None:
    """Write such a layer down, None where it is neither a product nor a norm.

    Args:
        path: where it is in the region's module.
    """
    found = widths(layer)
    if found is None:
        return None
    attributes = {"path": path, "in_features": found[0], "out_features": found[1]}
    return {"class": CLASS, "attributes": attributes, "parameters": {}, "modules": []}


def paths(description: dict[str, Any]) -> Iterator[str]:
    """Where such layers are in the module of a described tree."""
    if description["class"] == CLASS:
        yield description["attributes"]["path"]
    for _, child in description["modules"]:
        yield from paths(child)


def count(module: torch.nn.Module, layers: Sequence[str]) -> Counter[tuple[str, str]]:
    """Count such layers of a live module by what they are and why they are the host's, in words.

    Args:
        layers: their paths.
    """
    found = map(module.get_submodule, layers)
    return Counter(
        ("norms" if isinstance(layer, _NORMS) else "products", _why(layer)) for layer in found
    )


def _why(layer: torch.nn.Module) -> str:
    form = quantised_as(layer)
    if form is not None:
        others = better_files(layer)
        if not others:
            return f"quantised, {form}"
        return (
            f"quantised, {form}: this device unpacks it at each call; {' or '.join(others)} files "
            "it multiplies as they are"
        )
    weight = getattr(layer, "weight", None)
    if type(weight) not in (torch.nn.Parameter, torch.Tensor, type(None)):
        return f"the weight is a {type(weight).__name__}"
    if is_known(type(layer).__module__):
        return "plain weights in a quantised file"
    return f"{type(layer).__qualname__.rpartition('<locals>.')[2]} of {owner_of(type(layer))}"


def _run(input: torch.Tensor, path: str, out_features: int) -> torch.Tensor:
    if _thread.module is None:
        return _stand_in(input, path, out_features)
    layer, caller = _thread.module.get_submodule(path), _thread.caller
    shape = (*input.shape[:-1], out_features)

    def compute() -> torch.Tensor:
        result: torch.Tensor = layer(input) if caller is None else caller.call(layer, input)
        return result

    return operators.live(path, compute, shape, input)


def _stand_in(input: torch.Tensor, path: str, out_features: int) -> torch.Tensor:
    """A linear map of the same widths: a worker has no weights, and compares what lies around.

    Each feature is of two of the input's, for a full matrix takes longer to draw than a block to
    compile.
    """
    width, seed = input.shape[-1], zlib.crc32(path.encode())
    place = torch.arange(out_features, device=input.device)
    one, other = (input.index_select(-1, (place * by + seed) % width) for by in _PRIMES)
    return 0.8 * one - 0.6 * other  # as large as the input, as a real layer's about is


def _fake(input: torch.Tensor, path: str, out_features: int) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], out_features))


OPERATOR, _thread = operators.register(
    "host_layer(Tensor input, str path, int out_features) -> Tensor", _run, _fake, _Thread()
)
