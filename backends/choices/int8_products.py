"""Products by int8 weights, as the processor and the GPU are quicker with them.

The host's library comes to its kernels through a class of tensors, an operator and a choice among
backends, at each call, and where a model's weights come over at each call, the steps wait for the
processor. So its choice is asked for once for each form, and called.

Where the weight's rows were rotated before they were quantised (ConvRot), what they multiply has to
be rotated and quantised, too, at each call. The library does both in one kernel, which on some
cards takes several times what its reads and writes would. There it is quicker to rotate by a
product with a small matrix and to quantise by a kernel of ours (`int8_rows`); the product itself
stays the library's. So both are timed (`ways`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from ..device.gpu import kind_of
from ..host_api import activations, formats, kitchen, layers
from ..kernels.int8_rows import WIDEST, Int8Rows, results_for
from ..torch_api.cuda_queue import current_stream
from .ways import KEPT, Ways

logger = logging.getLogger(__name__)

FILE_NAME = "products.json"
#: Rotated by a product of its own.
APART = "apart"
#: So many neighbours are rotated together where the library's one kernel does it.
GROUP = 256
#: Of fewer rows the weight takes longer to read than the rows to rotate.
FEWEST_ROWS = 1024
#: Times differ by as much by themselves.
MUST_SAVE_MS = 0.005
#: So many elements are rotated and quantised at a time.
PIECE = 2**25


class _Means(NamedTuple):
    """What the way apart takes: the rotation `[GROUP, GROUP]`, and what quantises rotated rows;
    None leaves that to the library.
    """

    rotation: torch.Tensor
    rows: Int8Rows | None


class Int8Products:
    """A `host_layer.Caller`; for any thread."""

    def __init__(self, directory: Path, machine: str) -> None:
        """Read the times that were kept; no product is chosen yet.

        Args:
            directory: the pack's private folder.
            machine: a name for this machine's card and PyTorch.
        """
        path = directory / FILE_NAME
        self.ways = Ways(path, machine, APART, are_short=True)
        self._products: dict[Hashable, kitchen.Int8Product | None] = {}
        #: A captured call reads the rotation at each replay.
        self._means: dict[tuple[torch.device, torch.dtype], _Means] = {}

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
        """Return `linear(input, weight, bias)`, by the quicker way where the weight is rotated.

        Args:
            input: [..., in], or what an activation makes that of.
            weight: [out, in], a tensor of the library's or any other.
            act: that activation, by the host's name; the library computes it while it quantises.
        """
        parts = kitchen.int8_weight(weight)
        if parts is None:
            return linear(activations.activated(input, act), weight, bias)
        form = input.shape, parts.values.shape, input.dtype, parts.group, act

        def host() -> torch.Tensor:
            # Elsewhere PyTorch takes `linear` apart, and the library multiplies in full.
            is_whole = input.is_contiguous() or torch.is_inference_mode_enabled()
            product = self._product(form, input, parts, bias, act) if is_whole else None
            if product is None:
                return linear(activations.activated(input, act), weight, bias)
            return product(input, parts, bias, act)

        if parts.group != GROUP or not _is_open(input):
            return host()
        means = self._means_for(input)
        if means is None:
            return host()
        return self.ways.run(
            form,
            lambda: _class(input, parts.values, act),
            host,
            lambda: _apart(input, means, parts, bias, act),
            must_save_ms=MUST_SAVE_MS,
        )

    def _product(self, form: Hashable, *sample: Any) -> kitchen.Int8Product | None:
        """The library's for this form; None where it cannot be had by itself."""
        known = form, sample[0].device, sample[2] is None
        if known not in self._products:
            if len(self._products) >= KEPT:
                self._products.clear()
            try:
                self._products[known] = kitchen.int8_product(*sample)
            except RuntimeError as error:
                logger.debug("int8 products are called as the host does: %s", error)
                self._products[known] = None
        return self._products[known]

    def _means_for(self, like: torch.Tensor) -> _Means | None:
        """Those for this dtype, made at the first call; None while one is captured: nothing can be
        copied to the GPU then, and no code loaded.
        """
        form = like.device, like.dtype
        if form not in self._means and not torch.cuda.is_current_stream_capturing():
            rotation = hadamard() / _shrink(like.dtype)
            rows = Int8Rows.compiled(like.device) if like.is_cuda else None
            self._means[form] = _Means(rotation.to(like.device, like.dtype), rows)
        return self._means.get(form)


def _apart(
    input: torch.Tensor,
    means: _Means,
    weight: kitchen.Int8Weight,
    bias: torch.Tensor | None,
    act: str,
) -> torch.Tensor:
    width = weight.values.shape[1]
    shrink = _shrink(input.dtype)
    scale = weight.scale if shrink == 1.0 else weight.scale * shrink
    if means.rows is None or width > WIDEST:
        rows = _rotated(input, means, act)
        result = kitchen.multiply_int8(rows, weight.values, scale, bias)
    else:
        values, scales = _quantised(input, means, means.rows, act, width)
        stream = current_stream(input.get_device())
        result = kitchen.multiply_int8_rows(
            values, scales, weight.values, scale, bias, input.dtype, stream
        )
    return result.view(*input.shape[:-1], -1)


def _rotated(input: torch.Tensor, means: _Means, act: str) -> torch.Tensor:
    """What an activation makes of the input, as rows, rotated."""
    active = activations.activated(input, act)
    return (active.reshape(-1, GROUP) @ means.rotation).view(-1, active.shape[-1])


def _quantised(
    input: torch.Tensor, means: _Means, kernel: Int8Rows, act: str, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as int8 `[rows, width]`, and a scale for each row: some rows at a time, for nothing
    else needs what an activation makes of them, nor the rotated ones.
    """
    rows = input.reshape(-1, input.shape[-1])
    values, scales = results_for(len(rows), width, rows.device)
    pieces = (torch.split(each, max(1, PIECE // width)) for each in (rows, values, scales))
    for some, *into in zip(*pieces, strict=True):
        kernel.quantise(_rotated(some, means, act), (into[0], into[1]))
    return values, scales


def _shrink(dtype: torch.dtype) -> float:
    """What rows are divided by: the sum of a group may pass the largest number of float16. A power
    of two, which is exact.
    """
    return 16.0 if dtype is torch.float16 else 1.0


def hadamard() -> torch.Tensor:
    """Return the regular Hadamard matrix of a group, orthogonal and symmetric (ConvRot)."""
    four = 1.0 - 2.0 * torch.eye(4).flip(0)
    whole = four
    while len(whole) < GROUP:
        whole = torch.kron(whole, four)
    return whole / math.sqrt(GROUP)


def _is_open(input: torch.Tensor) -> bool:
    """Whether there may be a choice for these rows at all."""
    width = input.shape[-1]
    return (
        kind_of(input.device).has_nvrtc
        and input.dtype in (torch.float16, torch.bfloat16)
        and width % GROUP == 0
        and input.numel() >= FEWEST_ROWS * width
    )


def _class(input: torch.Tensor, weight: torch.Tensor, act: str) -> str:
    out, width = weight.shape
    rows = round(2 * math.log2(input.numel() // input.shape[-1]))
    dtype = str(input.dtype).removeprefix("torch.")
    name = f"{kitchen.version()} rows {dtype} {width} {out} {rows}"
    return f"{name} {act}" if act else name
