"""Products by int8 weights, in the way that is fastest on this processor and GPU.

The host's library reaches its kernels through a tensor class, an operator and a choice among
backends at each call, and where a model's weights are loaded at each call, steps wait for the
processor. So its choice is made once for each form, and then called directly.

Their input must be quantised row by row at each call, after an activation if the host's code has
one, and rotated if the weight's rows are (ConvRot). On some cards the library's kernels for that
take several times as long as their reads and writes. There our own kernel is faster (`int8_rows`).
The library handles rows that it does not accept.

The product itself is the library's, too, or that of our own graph, if one is loaded
(`own_products`). All available ways are timed (`ways`).

An input of several products, as of queries, keys and values, is quantised once for all of them,
unless the library multiplies.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from ..device.gpu import kind_of
from ..host_api import activations, formats, kitchen, layers
from ..kernels.int8_rows import GROUP, Int8Rows
from ..torch_api.cuda_queue import current_stream
from .autotuner import HOST, KEPT, Autotuner
from .auxiliary import AuxiliaryGraphs
from .own_products import OwnProduct, OwnProducts

logger = logging.getLogger(__name__)

FILE_NAME = "products.json"
#: Quantised by our own kernel.
APART = "apart"
#: Multiplied by our own graph.
OURS = "ours"
#: Of fewer rows the weight takes longer to read than the rows to quantise.
FEWEST_ROWS = 1024
#: Times differ by as much by themselves.
MUST_SAVE_MS = 0.005


class _Layer(NamedTuple):
    """The weight of a product."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    parts: kitchen.Int8Weight


class Int8Products:
    """A `call_context.Caller`; for any thread."""

    def __init__(
        self, directory: Path, machine: str, graphs: AuxiliaryGraphs | None = None
    ) -> None:
        """Read the times that were kept; no product is chosen yet.

        Args:
            directory: the pack's private folder.
            machine: a name for this machine's card and PyTorch.
            graphs: our own that may multiply; None: none yet.
        """
        path = directory / FILE_NAME
        self.ways = Autotuner(path, machine, (APART, OURS), are_short=True)
        self.own = OwnProducts(graphs or AuxiliaryGraphs())
        self._products: dict[Hashable, kitchen.Int8Product | None] = {}
        self._rows: dict[torch.device, Int8Rows] = {}

    def call(self, layer: torch.nn.Module, input: torch.Tensor) -> torch.Tensor:
        """Return what `layer(input)` would."""
        form = formats.of(layer)
        may_be_ours = form is not None and form.quantises_rows
        may_be_ours = may_be_ours and layers.may_be_multiplied_by(layer)
        with layers.multiplying_by(layer, self.multiply) if may_be_ours else nullcontext():
            result: torch.Tensor = layer(input)
        return result

    def multiply(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: str = ""
    ) -> torch.Tensor:
        """Return `linear(input, weight, bias)`, in the fastest way if the weight is int8.

        Args:
            input: [..., in], or the input of an activation before it.
            weight: [out, in], a tensor of the library's or any other.
            act: that activation, by the host's name; it is computed while rows are quantised.
        """
        parts = kitchen.int8_weight(weight)
        if parts is None:
            return linear(activations.activated(input, act), weight, bias)
        return self._multiplied(input, [_Layer(weight, bias, parts)], act)[0]

    def multiply_several(
        self, input: torch.Tensor, layers: Sequence[tuple[Any, Any]], act: str = ""
    ) -> list[torch.Tensor]:
        """Return what `multiply` would for each (weight, bias): in one way for all, if they are
        int8 and rotated alike.

        Args:
            input, act: as of `multiply`.
        """
        found = [(layer, kitchen.int8_weight(layer[0])) for layer in layers]
        int8 = [_Layer(*layer, parts) for layer, parts in found if parts is not None]
        if len(int8) < len(layers) or len({layer.parts.group for layer in int8}) > 1:
            return [self.multiply(input, *layer, act) for layer in layers]
        return self._multiplied(input, int8, act)

    def _multiplied(
        self, input: torch.Tensor, layers: Sequence[_Layer], act: str
    ) -> list[torch.Tensor]:
        """The products by weights that are rotated alike."""

        def host() -> list[torch.Tensor]:
            return [self._by_library(input, layer, act) for layer in layers]

        others, names = self._others(input, layers, act)
        if not others:
            return host()
        shapes = tuple(layer.parts.values.shape for layer in layers)
        return self.ways.run(
            (input.shape, shapes, input.dtype, input.device, layers[0].parts.group, act, *names),
            lambda: _class(input, layers, act, names),
            {HOST: host, **others},
            must_save_ms=dict.fromkeys(others, MUST_SAVE_MS),
            device=input.device,
        )

    def _others(
        self, input: torch.Tensor, layers: Sequence[_Layer], act: str
    ) -> tuple[dict[str, Callable[[], list[torch.Tensor]]], list[str]]:
        """The other available ways for products, and names that tell them from `APART` alone."""
        group = layers[0].parts.group
        if group not in (None, GROUP) or not _is_open(input):
            return {}, []
        if input.device not in self._rows:
            self._rows[input.device] = Int8Rows(input.device)
        kernel, rotated = self._rows[input.device], group is not None
        rows = kernel if kernel.takes(input, act=act, rotated=rotated) else None
        others: dict[str, Callable[[], list[torch.Tensor]]] = {}
        names = []
        if rows is not None:
            others[APART] = lambda: _apart(input, rows, layers, act)
        found = (self.own.of(input, layer.parts) for layer in layers)
        products = [product for product in found if product is not None]
        if len(products) == len(layers) and (rows is not None or not rotated):
            others[OURS] = lambda: _ours(products, input, rows, layers, act)
            names = [OURS if APART in others else f"{OURS} alone", products[0].name]
        return others, names

    def _by_library(self, input: torch.Tensor, layer: _Layer, act: str) -> torch.Tensor:
        # Elsewhere PyTorch takes `linear` apart, and the library multiplies in full.
        is_whole = input.is_contiguous() or torch.is_inference_mode_enabled()
        given = input, layer.parts, layer.bias, act
        product = self._product(*given) if is_whole else None
        if product is None:
            return linear(activations.activated(input, act), layer.weight, layer.bias)
        return product(*given)

    def _product(
        self,
        input: torch.Tensor,
        parts: kitchen.Int8Weight,
        bias: torch.Tensor | None,
        act: str,
    ) -> kitchen.Int8Product | None:
        """The library's function for such a product; None if it cannot be called directly."""
        form = input.shape, parts.values.shape, input.dtype, parts.group, act
        known = form, input.device, bias is None
        if known not in self._products:
            if len(self._products) >= KEPT:
                self._products.clear()
            try:
                self._products[known] = kitchen.int8_product(input, parts, bias, act)
            except RuntimeError as error:
                logger.debug("int8 products are called as the host does: %s", error)
                self._products[known] = None
        return self._products[known]


def _apart(
    input: torch.Tensor, kernel: Int8Rows, layers: Sequence[_Layer], act: str
) -> list[torch.Tensor]:
    values, scales = _quantised(input, kernel, layers, act)
    stream = current_stream(input.get_device())
    results = (
        kitchen.multiply_int8_rows(
            values, scales, parts.values, parts.scale, bias, input.dtype, stream
        )
        for _, bias, parts in layers
    )
    return [result.view(*input.shape[:-1], -1) for result in results]


def _ours(
    products: Sequence[OwnProduct],
    input: torch.Tensor,
    kernel: Int8Rows | None,
    layers: Sequence[_Layer],
    act: str,
) -> list[torch.Tensor]:
    if kernel is not None:
        values, scales = _quantised(input, kernel, layers, act)
    else:
        active = activations.activated(input, act)
        values, scales = kitchen.int8_rows(active.reshape(-1, active.shape[-1]))
    results = (
        product.multiply(values, scales, parts.values, parts.scale, bias)
        for product, (_, bias, parts) in zip(products, layers, strict=True)
    )
    return [result.view(*input.shape[:-1], -1) for result in results]


def _quantised(
    input: torch.Tensor, kernel: Int8Rows, layers: Sequence[_Layer], act: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The input of int8 products: int8 `[rows, width]`, and a scale for each row."""
    rows = input.reshape(-1, input.shape[-1]).contiguous()
    return kernel.quantise(rows, act=act, rotated=layers[0].parts.group is not None)


def _is_open(input: torch.Tensor) -> bool:
    """Whether there may be a choice for these rows."""
    return (
        kind_of(input.device).has_nvrtc
        and input.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and input.numel() >= FEWEST_ROWS * input.shape[-1]
    )


def _class(input: torch.Tensor, layers: Sequence[_Layer], act: str, names: Sequence[str]) -> str:
    """A name for calls that take about as long, including the available ways."""
    parts = [layer.parts for layer in layers]
    width = parts[0].values.shape[1]
    out = "+".join(str(each.values.shape[0]) for each in parts)
    rows = round(2 * math.log2(input.numel() // input.shape[-1]))
    sort = "plain" if parts[0].group is None else "rotated"
    dtype = str(input.dtype).removeprefix("torch.")
    name = f"{kitchen.version()} {sort} {dtype} {width} {out} {rows}"
    return " ".join(filter(None, (name, act, *names)))
