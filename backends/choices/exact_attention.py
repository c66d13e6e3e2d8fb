"""Attention kernels that compute exactly what PyTorch's own computes: cuDNN's, and those of
packages that a person may have installed.

Kernels that quantise (SageAttention, comfy-kitchen's) are none of them: they change the image, so a
node or a flag of ComfyUI chooses them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch

HALF = (torch.float16, torch.bfloat16)

#: From query [batch, heads, rows, width], key and value of as many or fewer heads, without a mask:
#: [batch, rows, heads * width].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Kernel(NamedTuple):
    """A kernel that may be there.

    Attributes:
        name: by which its times are kept.
        title: for people.
        package: what pip installs; empty for PyTorch's own.
        function: `module:name` of the package's; it takes [batch, rows, heads, width].
        cards: the major compute capabilities that it has code for; empty: PyTorch knows.
        dtypes: that it takes.
        widest: the largest head that it takes.
        set_up_ms: what a new size costs the processor in each process.
        worth_rows: from how many rows on it was seen to beat cuDNN's; None: not measured.
    """

    name: str
    title: str
    package: str = ""
    function: str = ""
    cards: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = HALF
    widest: int = 128
    set_up_ms: float = 0.0
    worth_rows: int | None = None


#: cuDNN makes a plan for each new size in each process.
CUDNN = Kernel("cudnn", "cuDNN", set_up_ms=65.0)
#: A build without its kernels for float16.
_FLASH3_FORWARD = Kernel(
    "flash3",
    "FlashAttention 3",
    "fa3-fwd",
    "fa3_fwd_interface:flash_attn_func",
    cards=(9,),
    dtypes=(torch.bfloat16,),
    widest=256,
    worth_rows=7000,
)
KERNELS = (
    CUDNN,
    _FLASH3_FORWARD,
    Kernel(
        "flash3_whole",
        "FlashAttention 3",
        "flash_attn_3",
        "flash_attn_interface:flash_attn_func",
        cards=(9,),
        widest=256,
    ),
    # Its kernels are compiled at the first call of a sort.
    Kernel(
        "flash4",
        "FlashAttention 4",
        "flash-attn-4",
        "flash_attn.cute:flash_attn_func",
        cards=(9, 10, 12),
        set_up_ms=65.0,
    ),
)


class Found(NamedTuple):
    """A kernel that is there."""

    kernel: Kernel
    version: str
    attend: Attend

    @property
    def name(self) -> str:
        """By which its times are kept."""
        return self.kernel.name

    @property
    def version_name(self) -> str:
        """Unique among its versions, whose times differ."""
        return " ".join(filter(None, (self.name, self.version)))

    def takes(self, dtype: torch.dtype, width: int) -> bool:
        """Tell whether it computes with heads of this dtype and width at all."""
        return dtype in self.kernel.dtypes and width <= self.kernel.widest


def found(kernels: Iterable[Kernel], major: int) -> tuple[list[Found], list[tuple[Kernel, str]]]:
    """Return those kernels that are there for cards of a major compute capability, and those that
    are installed and cannot be imported, with the error.
    """
    there, broken = [], []
    for kernel in kernels:
        if kernel.cards and major not in kernel.cards:
            continue
        if not kernel.package:
            there.append(Found(kernel, "", _cudnn))
        elif is_installed(kernel):
            try:
                there.append(Found(kernel, _version(kernel), _of_package(kernel)))
            except Exception as error:  # a package built for another PyTorch raises anything
                broken.append((kernel, f"{type(error).__name__}: {error}"))
    return there, broken


def missing(kernels: Collection[Kernel], major: int) -> list[Kernel]:
    """Return those that cards of this capability are known to gain from, and that are not there in
    any build.
    """
    there = {kernel.title for kernel in kernels if kernel.package and is_installed(kernel)}
    return [
        kernel
        for kernel in kernels
        if kernel.worth_rows and major in kernel.cards and kernel.title not in there
    ]


def is_installed(kernel: Kernel) -> bool:
    """Tell whether a kernel's package is there, without importing it."""
    module = kernel.function.partition(":")[0]
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # what holds it is not there, or broken
        return False


def _version(kernel: Kernel) -> str:
    try:
        return importlib.metadata.version(kernel.package)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def _of_package(kernel: Kernel) -> Attend:
    module, _, name = kernel.function.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result = function(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
        heads: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return heads.flatten(2)

    return attend


def _cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    try:
        operator = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        result: torch.Tensor = operator(query, key, value, None, False)[0]
    except (AttributeError, TypeError) as error:  # another PyTorch's takes other arguments
        raise RuntimeError(f"PyTorch's cuDNN attention is not the known one: {error}") from error
    return result.transpose(1, 2).flatten(2)
