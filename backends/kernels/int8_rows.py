"""Rows as int8 with a scale each, in one pass: what an int8 product multiplies.

Where an int8 weight's rows were rotated before they were quantised (ConvRot), what it multiplies is
rotated, too; and the host's code may put an activation before that. Of the host's library the
kernel that only quantises took three times what its reads and writes would (an H200: 0.18 of
0.05 ms for 14040 rows of 5120), and the one that does all of it takes longer. Here each thread
reads its part of a row once, sixteen bytes at a time, and keeps it in registers in float32. Eight
threads hold a group that is rotated: of the eight bits of an element's number in it, one of three
pairs each lies across threads. So the rotation takes three exchanges for two elements.

Source of the rotation: https://arxiv.org/abs/2512.03673
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from ..device.gpu import is_capturing
from ..torch_api.cuda_source import Launch, compile_or_warn

#: What the kernel does, in words.
WHAT = "turning what int8 weights multiply into int8"
#: So many neighbours are rotated together.
GROUP = 256
#: Elements that a thread reads at once, and how often it does so (the source's `PLACES`).
_AT_ONCE, _PLACES = 8, 4
#: In bytes: what is read at once begins at a multiple of itself.
_ALIGNED = 16
_WARP, _MOST_THREADS = 32, 1024
#: The longest row that a block holds.
WIDEST = _AT_ONCE * _PLACES * _MOST_THREADS


class _Activation(NamedTuple):
    """An activation that the kernel computes: its name there, and how many elements it reads for
    one.
    """

    name: str
    parts: int


#: By the host's names (`host_api.activations`), as its library computes them: in float32.
ACTIVATIONS = {
    "": _Activation("NONE", 1),
    "gelu_tanh": _Activation("GELU_TANH", 1),
    "swiglu": _Activation("SWIGLU", 2),
}


class Sort(NamedTuple):
    """Rows that one kernel is compiled for.

    Attributes:
        dtype: float16 or bfloat16.
        act: what is done to them first, a key of `ACTIVATIONS`.
        rotated: whether groups of `GROUP` are rotated after it.
    """

    dtype: torch.dtype
    act: str = ""
    rotated: bool = False


def source(sort: Sort) -> str:
    """Return the source of a kernel."""
    known = {
        "HALF": int(sort.dtype is torch.float16),
        "ACTIVATION": ACTIVATIONS[sort.act].name,
        "ROTATED": int(sort.rotated),
        "PLACES": _PLACES,
    }
    defined = "".join(f"#define {name} {value}\n" for name, value in known.items())
    return defined + Path(__file__).with_suffix(".cu").read_text("utf-8")


class Int8Rows:
    """Quantises rows on one GPU. A kernel is compiled at the first rows of its sort."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launches: dict[Sort, Launch | None] = {}

    def takes(self, rows: torch.Tensor, *, act: str = "", rotated: bool = False) -> bool:
        """Tell whether `quantise` can be called with rows such as these, of any shape.

        Not if the kernel cannot be compiled, which the log says. Nor within a capture if it was not
        compiled yet, because no code can be loaded then.
        """
        sort = Sort(rows.dtype, act, rotated)
        return _may_be(rows, sort) and self._launch_for(sort) is not None

    def quantise(
        self, rows: torch.Tensor, *, act: str = "", rotated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows as whole numbers from -127 to 127, and their scales.

        Nothing is rounded before that: the activation and the rotation are computed in float32.

        Args:
            rows: [rows, in], float16 or bfloat16, contiguous.
            act: what is done to them first, a key of `ACTIVATIONS`. A gated one leaves `width`
                elements, half of `in`; any other leaves all.
            rotated: whether each `GROUP` of these is multiplied by the regular Hadamard matrix.

        Returns:
            int8 [rows, width]; float32 [rows, 1]. Of a row with a NaN or an infinity the second is
            not finite, and the first means nothing.

        Raises:
            ValueError: the width is no multiple of 8 (of `GROUP`, where they are rotated) up to
                `WIDEST`; or another layout, alignment, dtype or activation.
            RuntimeError: there is no kernel for these (`takes`).
        """
        count, held = rows.shape
        sort = Sort(rows.dtype, act, rotated)
        if not rows.is_contiguous() or not _may_be(rows, sort):
            raise ValueError(
                f"rows must be contiguous, aligned, and of a width that the kernel takes, got "
                f"{list(rows.shape)} with strides {list(rows.stride())} for {sort}"
            )
        launch = self._launch_for(sort)
        if launch is None:
            raise RuntimeError(f"there is no kernel for {sort} on {self._device}")
        width = held // ACTIVATIONS[act].parts
        values = torch.empty(count, width, dtype=torch.int8, device=rows.device)
        scales = torch.empty(count, 1, dtype=torch.float32, device=rows.device)
        threads = -(-width // (_AT_ONCE * _PLACES))
        arguments = rows, values, scales, width // _AT_ONCE
        launch(count, -(-threads // _WARP) * _WARP, arguments)
        return values, scales

    def _launch_for(self, sort: Sort) -> Launch | None:
        if sort not in self._launches:
            if is_capturing(self._device):
                return None
            found = compile_or_warn(source(sort), "quantise_rows", WHAT, self._device)
            self._launches[sort] = found
        return self._launches[sort]


def _may_be(rows: torch.Tensor, sort: Sort) -> bool:
    """Tell whether a kernel may be compiled for these rows."""
    if sort.dtype not in (torch.float16, torch.bfloat16) or sort.act not in ACTIVATIONS:
        return False
    held, parts = rows.shape[-1], ACTIVATIONS[sort.act].parts
    step = parts * (GROUP if sort.rotated else _AT_ONCE)
    return held % step == 0 and 0 < held <= parts * WIDEST and rows.data_ptr() % _ALIGNED == 0
