"""A layer that a region leaves to the host: one operator in its graph, which calls the live layer.
Several layers of one input have another operator (`SEVERAL`), which does common work once.

Its weights are not plain tensors (quantised, packed), or its code is another pack's. What surrounds
it is compiled, and it keeps its format, LoRA and place in memory. If it rounds each element of its
input (fp8), the graph's kernel that computes the input does, and the layer gets the rounded input.
If a call of it is only a product, and its weights were fetched with the region's own, they are
multiplied without it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch.nn.functional import linear

from ..device.gpu import is_capturing
from ..host_api import activations, formats
from ..host_api.layers import (
    rounds_inputs_to,
    takes_rounded,
)
from ..kinds.layout import CONTIGUOUS
from ..kinds.module_tree import walk
from ..reasons import Reason, of
from . import registering
from .call_context import now
from .stand_in import StandIn

#: What stands for the class of such a layer in a description, and of the other parts of a region
#: that its graph calls (`live_parts`).
CLASS, PART, CONVOLUTION = "the host's layer", "a live part", "a live convolution"
LIVE = (CLASS, PART, CONVOLUTION)
#: By which the stand-in of a layer goes through its input's features.
_PRIMES = (7919, 104729)
#: Why a call is not recorded: it is others' code, or brings its weights over itself.
OTHERS, _CALLED = of("code_between"), of("layer_between")
#: Layers that are no products.
NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm)


class UnfitError(RuntimeError):
    """Others' code returned what a graph cannot use, for a `reason`."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


def called(
    path: str,
    compute: Callable[[], Any],
    shape: tuple[Any, ...],
    *inputs: torch.Tensor,
    layout: str = CONTIGUOUS,
) -> torch.Tensor:
    """Return the result of a live part of a region (`registering.live`).

    Raises:
        UnfitError: it is others' code, and returns no such tensor.
    """
    if path not in now().others:
        return registering.live(path, compute, shape, *inputs, layout=layout)

    def checked() -> torch.Tensor:
        result = compute()
        if (
            type(result) not in (torch.Tensor, torch.nn.Parameter)
            or tuple(result.shape) != shape
            or result.device != inputs[0].device
        ):
            raise UnfitError(of("gives_otherwise", path=path))
        return result  # type: ignore[no-any-return]

    def call() -> torch.Tensor:
        return registering.live(path, checked, shape, *inputs, layout=layout, own=True)

    record = now().record
    return call() if record is None else record.call(path, inputs, call)


def part_at(path: str) -> torch.nn.Module | None:
    """Return what is at a path in the module of the region that is computed; None in a worker."""
    module = now().module
    return None if module is None else module.get_submodule(path)


class HostLayer(StandIn):
    """Stands in a twin for a layer left to the host: `[..., in] -> [..., out]`."""

    def __init__(
        self, path: str, in_features: int, out_features: int, rounded_to: str | None = None
    ) -> None:
        """Set up for one layer.

        Args:
            path: where the layer is in the region's module.
            in_features: the width of its input.
            out_features: the width of its result.
            rounded_to: the dtype that it rounds its input's elements to, if it does.
        """
        super().__init__(path)
        self.in_features, self.out_features = in_features, out_features
        self.rounded_to: torch.dtype | None = getattr(torch, rounded_to) if rounded_to else None
        #: One number: what a rounded element is worth; None where it is worth itself.
        self.input_scale: torch.Tensor | None
        self.register_parameter("input_scale", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor
        if self.rounded_to is None:
            result = OPERATOR(input, self.path, self.out_features, "")
            return result
        scale = None if self.input_scale is None else self.input_scale.float().reshape(())
        most = torch.finfo(self.rounded_to).max
        scaled = input if scale is None else input * scale.reciprocal()
        values = scaled.clamp(-most, most).to(self.rounded_to)
        dtype = str(input.dtype).removeprefix("torch.")
        result = ROUNDED(values, scale, self.path, self.out_features, dtype)
        return result


class _Activated:
    """Such a layer, of its input after an activation; anything asked of it is the layer's."""

    def __init__(self, layer: HostLayer, act: str) -> None:
        self._layer, self._act = layer, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = OPERATOR(x, self.path, self.out_features, self._act)
        return result


def activations_folded() -> AbstractContextManager[None]:
    """Until this ends, fold an activation into the host's product after it, where the graph does
    not round the product's input: an int8 product includes the activation. For a worker, while it
    traces.
    """

    def folded(layer: Any, act: str) -> _Activated | None:
        known = isinstance(layer, HostLayer) and layer.rounded_to is None
        return _Activated(layer, act) if known else None

    return activations.answered_by(folded)


def widths(layer: torch.nn.Module) -> tuple[int, int] | None:
    """Return the widths of a layer of any class that computes a product or, twice the same, a norm
    over the last axis; None for any other.
    """
    if isinstance(layer, NORMS):  # packs have their own norms along with their products
        return (layer.normalized_shape * 2)[:2] if len(layer.normalized_shape) == 1 else None
    found = tuple(getattr(layer, name, None) for name in ("in_features", "out_features"))
    named = type(layer).__name__.endswith("Linear") or isinstance(layer, torch.nn.Linear)
    return found if named and all(type(width) is int for width in found) else None  # type: ignore[return-value]


def describe(path: str, layer: torch.nn.Module) -> dict[str, Any] | None:
    """Describe such a layer; None if it is neither a product nor a norm.

    Args:
        path: where it is in the region's module.
    """
    found = widths(layer)
    if found is None:
        return None
    attributes: dict[str, Any] = {
        "path": path,
        "in_features": found[0],
        "out_features": found[1],
    }
    parameters = {}
    rounded_to = rounds_inputs_to(layer)
    if rounded_to is not None:
        attributes["rounded_to"] = str(rounded_to).removeprefix("torch.")
        scale = getattr(layer, "input_scale", None)
        if scale is not None:
            dtype = str(scale.dtype).removeprefix("torch.")
            parameters["input_scale"] = {"shape": list(scale.shape), "dtype": dtype}
    return {"class": CLASS, "attributes": attributes, "parameters": parameters, "modules": []}


def paths(description: dict[str, Any]) -> Iterator[str]:
    """The paths of such layers, and of other live parts, in a described tree."""
    return (part["attributes"]["path"] for _, part in walk(description) if part["class"] in LIVE)


def rounded_paths(description: dict[str, Any]) -> Iterator[str]:
    """The paths of those whose input a graph rounds."""
    layers = (part["attributes"] for _, part in walk(description) if part["class"] == CLASS)
    return (layer["path"] for layer in layers if "rounded_to" in layer)


def unrounded(description: dict[str, Any]) -> dict[str, Any]:
    """Return a described tree whose graph rounds no layer's input: one that serves all formats."""
    if description["class"] == CLASS:
        attributes = {k: v for k, v in description["attributes"].items() if k != "rounded_to"}
        return {**description, "attributes": attributes, "parameters": {}}
    modules = [[name, unrounded(child)] for name, child in description["modules"]]
    return {**description, "modules": modules}


def round_none(twin: torch.nn.Module) -> None:
    """Have no layer of a twin round its input."""
    for layer in twin.modules():
        if isinstance(layer, HostLayer):
            layer.rounded_to = None


def why_not_rounded(layers: Iterable[tuple[str, torch.nn.Module]]) -> Reason | None:
    """Say why one of these live layers would not round its input at this moment, as its graph does;
    None if all do.

    Args:
        layers: with their paths (`rounded_paths`).
    """
    for path, layer in layers:
        if not takes_rounded(layer):
            form = getattr(formats.of(layer), "people", "")
            return of("patched_per_call", path=path, format=form)
    return None


def _run(input: torch.Tensor, path: str, out_features: int, act: str) -> torch.Tensor:
    module, caller, given = now().module, now().caller, _given(path, input.dtype)
    if module is None:
        return _stand_in(activations.activated(input, act), path, out_features)
    shape = (*input.shape[:-1], out_features)
    is_code = path in now().others
    if act and is_code:
        is_code = not activations.passes_over(module.get_submodule(path))
        if is_code:
            input, act = activations.activated(input, act), ""

    def compute() -> torch.Tensor:
        if given is not None and caller is not None:
            return caller.multiply(input, *given, act)
        layer = module.get_submodule(path)
        if act:
            return activations.multiply(layer, input, act)
        if given is not None:
            return linear(input, *given)
        result: torch.Tensor = layer(input) if caller is None else caller.call(layer, input)
        return result

    return (called if is_code else registering.live)(path, compute, shape, input)


def _run_several(
    input: torch.Tensor, paths: list[str], out_features: list[int], act: str
) -> list[torch.Tensor]:
    caller = now().caller
    pairs = ((n, _given(path, input.dtype)) for n, path in enumerate(paths))
    given = {n: pair for n, pair in pairs if pair is not None}
    # Others' code may write into the input: then each layer is computed in its turn.
    if caller is None or len(given) < 2 or any(path in now().others for path in paths):
        return [_run(input, *layer, act) for layer in zip(paths, out_features, strict=True)]
    multiply = partial(caller.multiply_several, input, tuple(given.values()), act)

    @cache
    def products() -> dict[int, torch.Tensor]:
        return dict(zip(given, multiply(), strict=True))

    def computed(n: int) -> torch.Tensor:
        if n not in given:
            return _run(input, paths[n], out_features[n], act)
        shape = (*input.shape[:-1], out_features[n])
        return registering.live(paths[n], lambda: products()[n], shape, input)

    return [computed(n) for n in range(len(paths))]


def _run_rounded(
    values: torch.Tensor, scale: torch.Tensor | None, path: str, out_features: int, dtype: str
) -> torch.Tensor:
    wanted: torch.dtype = getattr(torch, dtype)
    module, given = now().module, _given(path, wanted)
    if module is None:
        unrounded = values.to(wanted) if scale is None else values.to(wanted) * scale.to(wanted)
        return _stand_in(unrounded, path, out_features)
    shape = (*values.shape[:-1], out_features)

    def compute() -> torch.Tensor:
        rows = values.reshape(-1, values.shape[-1])
        one = _one(values.device) if scale is None else scale
        known = formats.rounding_to(values.dtype)
        if given is not None:
            return known.multiply(rows, one, *given, wanted).reshape(shape)
        rounded = known.given(rows, one, wanted)
        result: torch.Tensor = module.get_submodule(path)(rounded)
        return result.reshape(shape)

    return registering.live(path, compute, shape, values, dtype=wanted)


def _given(path: str, dtype: torch.dtype) -> tuple[Any, Any] | None:
    """By what inputs of a dtype are multiplied in place of a call of the layer, if by anything."""
    context = now()
    found = None if path in context.others else context.given.get(path)
    return found if found is not None and found[0].dtype is dtype else None


def _why_apart(input: torch.Tensor, path: str, *_: Any) -> Reason | None:
    """Why a product cannot be recorded: a layer is called for it, or a library measures in it."""
    return _why_not_recorded(path, input.dtype)


def _why_several_apart(input: torch.Tensor, paths: list[str], *_: Any) -> Reason | None:
    reasons = (_why_not_recorded(path, input.dtype) for path in paths)
    return next(filter(None, reasons), None)


def _why_rounded_apart(
    values: torch.Tensor, scale: torch.Tensor | None, path: str, out_features: int, dtype: str
) -> Reason | None:
    return _why_not_recorded(path, getattr(torch, dtype))


def _why_not_recorded(path: str, dtype: torch.dtype) -> Reason | None:
    if path in now().others:
        return OTHERS
    layer = part_at(path)
    if layer is None or _given(path, dtype) is None:
        return _CALLED
    form = formats.of(layer)
    if form is not None and not form.may_be_captured:
        return of("format_not_replayed", format=form.name)
    return None


def _one(device: torch.device) -> torch.Tensor:
    """A permanent float32 1 on a device, as products read their scales there."""
    found = _ones.get(device)
    if found is None:
        found = torch.ones((), dtype=torch.float32, device=device)
        if not is_capturing(device):
            _ones[device] = found
    return found


def _stand_in(input: torch.Tensor, path: str, out_features: int) -> torch.Tensor:
    """A linear map of the same widths: a worker has no weights, and compares what surrounds it.

    Each feature mixes two of the input's, because drawing a full matrix takes longer than
    compiling.
    """
    width, seed = input.shape[-1], zlib.crc32(path.encode())
    place = torch.arange(out_features, device=input.device)
    one, other = (input.index_select(-1, (place * by + seed) % width) for by in _PRIMES)
    return 0.8 * one - 0.6 * other  # about as large as the input, like a real layer's


def _fake(input: torch.Tensor, path: str, out_features: int, act: str) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], out_features))


def _fake_several(
    input: torch.Tensor, paths: list[str], out_features: list[int], act: str
) -> list[torch.Tensor]:
    return [input.new_empty((*input.shape[:-1], width)) for width in out_features]


def _fake_rounded(
    values: torch.Tensor, scale: torch.Tensor | None, path: str, out_features: int, dtype: str
) -> torch.Tensor:
    return values.new_empty((*values.shape[:-1], out_features), dtype=getattr(torch, dtype))


OPERATOR, _ = registering.register(
    "host_layer(Tensor input, str path, int out_features, str act) -> Tensor",
    _run,
    _fake,
    None,
    _why_apart,
)
SEVERAL, _ = registering.register(
    "host_layers(Tensor input, str[] paths, int[] out_features, str act) -> Tensor[]",
    _run_several,
    _fake_several,
    None,
    _why_several_apart,
)
ROUNDED, _ones = registering.register(
    "host_layer_of_rounded(Tensor values, Tensor? scale, str path, int out_features, str dtype)"
    " -> Tensor",
    _run_rounded,
    _fake_rounded,
    dict[torch.device, torch.Tensor](),
    _why_rounded_apart,
)
