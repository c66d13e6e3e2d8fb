"""Products by int8 weights whose rows were rotated before they were quantised (ConvRot): what they
multiply has to be rotated and quantised, too, at each call.

The host's library does both in one kernel, which on some cards takes several times what its reads
and writes would. There it is quicker to rotate by a product with a small matrix, and to let the
library quantise and multiply as for weights that are not rotated. So both are timed (`timings`).
"""

from __future__ import annotations

import logging
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..host_api import kitchen, layers
from .timings import HOST, KEPT, Timings, saved

logger = logging.getLogger(__name__)

FILE_NAME = "products.json"
#: Rotated by a product of its own.
APART = "apart"
FORMAT = "int8_tensorwise"
#: So many neighbours are rotated together where the library's one kernel does it.
GROUP = 256
#: Of fewer rows the weight takes longer to read than the rows to rotate.
FEWEST_ROWS = 1024
#: Times differ by as much by themselves.
MUST_SAVE_MS = 0.005
#: The rotated rows are held beside the plain ones: this part of the card's memory at most.
MOST_MEMORY = 1 / 64
linear = torch.nn.functional.linear


class RotatedProducts:
    """A `host_layer.Caller`; for any thread."""

    def __init__(self, directory: Path, machine: str) -> None:
        """Args: the pack's private folder, and a name for this machine's card and PyTorch."""
        self._timings = Timings(directory / FILE_NAME, machine, frozenset({APART}), are_short=True)
        self._chosen: dict[Any, str] = {}
        #: A captured call reads one at each replay.
        self._rotations: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def call(self, layer: torch.nn.Module, input: torch.Tensor) -> torch.Tensor:
        """Return what `layer(input)` would."""
        result: torch.Tensor
        if (
            layers.quantised_as(layer) != FORMAT
            or not _is_open(input)
            or not layers.may_be_multiplied_by(layer)
        ):
            result = layer(input)
            return result
        with layers.multiplying_by(layer, self.multiply):
            result = layer(input)
            return result

    def multiply(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `linear(input, weight, bias)`, by the quicker way where the weight is rotated.

        Args:
            input: [..., in], float16 or bfloat16.
            weight: [out, in], a tensor of the library's or any other.
        """
        parts = kitchen.rotated_weight(weight)
        if parts is None or parts.group != GROUP or input.nbytes > _most_bytes(input.device):
            return linear(input, weight, bias)
        rotation = self._rotation(input)
        if rotation is None:
            return linear(input, weight, bias)

        def host() -> torch.Tensor:
            return linear(input, weight, bias)

        def apart() -> torch.Tensor:
            return _apart(input, rotation, parts, bias)

        form = (input.shape, parts.values.shape, input.dtype)
        chosen = self._chosen.get(form)
        if chosen is None:
            size_class = _class(input, parts.values)
            times = self._timings.of(size_class, {HOST: host, APART: apart})
            if times is None:
                return host()
            chosen = APART if saved(times, APART) >= MUST_SAVE_MS else HOST
            if len(self._chosen) >= KEPT:
                self._chosen.clear()
            self._chosen[form] = chosen
        if chosen == APART:
            try:
                return apart()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                logger.debug("A rotated product was refused: %s", error)
                self._chosen[form] = HOST
        return host()

    def _rotation(self, like: torch.Tensor) -> torch.Tensor | None:
        """What rotates a group of this dtype, made at the first call; None while one is captured:
        nothing can be copied to the GPU then.
        """
        form = like.device, like.dtype
        if form not in self._rotations and not torch.cuda.is_current_stream_capturing():
            rotation = hadamard() / _shrink(like.dtype)
            self._rotations[form] = rotation.to(like.device, like.dtype)
        return self._rotations.get(form)


def _apart(
    input: torch.Tensor,
    rotation: torch.Tensor,
    weight: kitchen.RotatedWeight,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    rows = (input.reshape(-1, GROUP) @ rotation).view(-1, input.shape[-1])
    shrink = _shrink(input.dtype)
    scale = weight.scale if shrink == 1.0 else weight.scale * shrink
    result = kitchen.multiply_int8(rows, weight.values, scale, bias)
    return result.view(*input.shape[:-1], -1)


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
        input.is_cuda
        and torch.version.cuda is not None
        and input.dtype in (torch.float16, torch.bfloat16)
        and width % GROUP == 0
        and input.numel() >= FEWEST_ROWS * width
    )


@cache
def _most_bytes(device: torch.device) -> float:
    return MOST_MEMORY * torch.cuda.get_device_properties(device).total_memory


def _class(input: torch.Tensor, weight: torch.Tensor) -> str:
    out, width = weight.shape
    rows = round(2 * math.log2(input.numel() // width))
    return f"{str(input.dtype).removeprefix('torch.')} {width} {out} {rows}"
