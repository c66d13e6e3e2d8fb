"""The formats of quantised weights: one table for all that depends on a format.

A format without a row in `_ROWS` is the host's: its layers are called, and steps with them are not
captured.

Relies on the host's `comfy/quant_ops.py` (`QUANT_ALGOS`: names, and the library's layouts) and
`comfy/ops.py` (`pick_operations`: which device multiplies by what).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from . import kitchen


class Rounding(NamedTuple):
    """How a layer takes its input: each element rounded by itself, times one scale.

    Attributes:
        dtype: what elements are rounded to.
        is_known: whether this host rounds to that dtype so.
        given: `(values, scale, dtype)`: rounded rows, as the layer would have made them.
        multiply: `(values, scale, weight, bias, dtype)`: rounded rows by a weight of the format.
    """

    dtype: torch.dtype
    is_known: Callable[[torch.dtype], bool]
    given: Callable[[torch.Tensor, torch.Tensor, torch.dtype], Any]
    multiply: Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Format:
    """How the host keeps a layer's weight, and what of its products is known.

    Attributes:
        name: in files, and for the host.
        people: the display name.
        layout: the library's class for the weight's memory.
        multiplied_where: the host's function that tells whether a device multiplies by it, "" for
            every device; others unpack the weight at each call.
        is_offered: whether users are told of files in it where theirs is unpacked.
        may_be_captured: whether its products were tried in a CUDA graph.
        takes_memory_by_stream: whether its products allocate per stream and reallocate for larger
            sizes: within a capture that ends the process, and after one the graph would write into
            others' memory.
        quantises_rows: whether its product takes the plain input and does the rest, so that it
            needs no layer and can be preceded by an activation.
        rounding: how its layers take their inputs, if elements are rounded one by one.
        plain: which host layers multiply by plain weights as stored, and those weights' dtype.
    """

    name: str
    people: str = ""
    layout: str = ""
    multiplied_where: str = ""
    is_offered: bool = False
    may_be_captured: bool = False
    takes_memory_by_stream: bool = False
    quantises_rows: bool = False
    rounding: Rounding | None = None
    plain: tuple[str, torch.dtype] | None = None


_ROWS = (
    Format(
        "int8_tensorwise",
        "int8",
        kitchen.INT8_LAYOUT,
        is_offered=True,
        may_be_captured=True,
        takes_memory_by_stream=True,  # 0.2.22 and newer (`ops/cutlass_gemm_int8.cu`)
        quantises_rows=True,
    ),
    Format(
        "float8_e4m3fn",
        "fp8",
        kitchen.FP8_LAYOUT,
        multiplied_where="supports_fp8_compute",
        is_offered=True,
        may_be_captured=True,
        rounding=Rounding(
            torch.float8_e4m3fn,
            kitchen.rounds_as_known,
            kitchen.rounded_input,
            kitchen.multiply_rounded,
        ),
        plain=("fp8_ops", torch.float8_e4m3fn),
    ),
    Format("float8_e5m2", "fp8", "TensorCoreFP8E5M2Layout", "supports_fp8_compute"),
    Format("mxfp8", "mxfp8", "TensorCoreMXFP8Layout", "supports_mxfp8_compute", is_offered=True),
    Format("nvfp4", "nvfp4", "TensorCoreNVFP4Layout", "supports_nvfp4_compute"),
    # Its product times its kernels for each new size, which no capture survives
    # (`ops/convrot_w4a4.cu`).
    Format("convrot_w4a4", "int4", "TensorCoreConvRotW4A4Layout"),
)
#: By name.
FORMATS = {row.name: row for row in _ROWS}


def of(layer: Any) -> Format | None:
    """Return the format of a layer's quantised weight, or None."""
    name = getattr(layer, "quant_format", None)
    if not isinstance(name, str):
        return None
    return FORMATS.get(name) or _without_row(name)


@cache
def _without_row(name: str) -> Format:
    return Format(name, name)


def rounding_to(dtype: torch.dtype) -> Rounding:
    """Return how rows rounded to a dtype are multiplied."""
    for row in FORMATS.values():  # asked for each product
        if row.rounding is not None and row.rounding.dtype is dtype:
            return row.rounding
    raise KeyError(f"no format rounds inputs to {dtype}")


def plain_layers(dtype: torch.dtype) -> list[str]:
    """Return the host's layers that multiply by plain weights of a dtype as stored."""
    found = (row.plain for row in FORMATS.values())
    return [plain[0] for plain in found if plain is not None and plain[1] is dtype]


def better_files(layer: Any) -> list[str]:
    """Return the formats (display names) a layer's device multiplies as they are; none if its own
    is.
    """
    unpacked = getattr(layer, "_disabled_formats", ())
    form = of(layer)
    return [] if form is None or form.name not in unpacked else _offered(unpacked)


def quick_files() -> list[str]:
    """Return the display names of formats that the host's device multiplies as they are."""
    import comfy.model_management as management

    device = management.get_torch_device()
    asked = {name: row.multiplied_where for name, row in FORMATS.items() if row.multiplied_where}
    return _offered(
        [name for name, where in asked.items() if not getattr(management, where, _never)(device)]
    )


def _offered(unpacked: Collection[str]) -> list[str]:
    import comfy.quant_ops

    known = getattr(comfy.quant_ops, "QUANT_ALGOS", ())
    return [
        row.people
        for name, row in FORMATS.items()
        if row.is_offered and name in known and name not in unpacked
    ]


def _never(_: Any) -> bool:
    return False
