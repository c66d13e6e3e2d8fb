"""Unpack weights of GGUF files: one graph per format, at no place of any model, for all sizes.

Such layers stay another pack's within other graphs (`host_layer`), which may have this one unpack
the weight (`choices.packed_products`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from ..contract import InputSpec, RegionSpec, Symbol
from ..kernels.packed_blocks import FORMATS, BlockFormat, code_of, unpack
from ..plans.family import Family
from ..plans.plan import Form, Place, Plan
from ..plans.specs import describe_place

NAME = "packed_weight"
#: What each step may be rounded to, and what the result is in.
DTYPES = ("float16", "bfloat16", "float32")
#: Kernels are tuned for so many numbers, those of a small product of a transformer.
_TUNED = 2**22


class Unpacked(Form):
    """`packed_blocks.unpack` of one format."""

    family = NAME

    def __init__(self, form: BlockFormat, steps: str, dtype: str) -> None:
        """Set up for a format; dtypes are those of the steps and of the result."""
        self.name = name_of(form.name, steps, dtype)
        self._form = form
        self._steps: torch.dtype = getattr(torch, steps)
        self._dtype: torch.dtype = getattr(torch, dtype)

    def label(self, module: Any) -> str:
        return label(self._form.name)

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("blocks", "uint8", ("blocks", self._form.size)),)

    def code(self) -> tuple[Callable[..., Any], ...]:
        return code_of(self._form)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return unpack(inputs[0], self._form, self._steps, self._dtype)


def name_of(form: str, steps: str, dtype: str) -> str:
    return f"{form} {steps} {dtype}"


def label(form: str) -> str:
    return f"{form} weights"


FORMS: dict[str, Form] = {
    each.name: each
    for each in (
        Unpacked(form, steps, dtype)
        for form, steps, dtype in product(FORMATS.values(), DTYPES, DTYPES)
        if form.is_packed
    )
}


def describe(form: str, steps: torch.dtype, dtype: torch.dtype, device: str) -> RegionSpec:
    """Describe the kind.

    Args:
        form: a format's name.
        steps: what each step is rounded to.
        dtype: of the result.
        device: its type, as PyTorch names it.
    """
    names = (str(each).removeprefix("torch.") for each in (steps, dtype))
    of = FORMS[name_of(form, *names)]
    place = Place(label(form), torch.nn.Identity(), of)
    plan = Plan(symbols={"blocks": symbol(FORMATS[form])})
    return describe_place(place, plan, dtype=dtype, device=device)


def symbol(form: BlockFormat) -> Symbol:
    """Return how many blocks of a format there may be."""
    return Symbol("blocks", 1, form.most, _TUNED // form.width)


FAMILY = Family(title="GGUF files of all models", roots={}, forms=FORMS)
