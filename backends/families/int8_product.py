"""Int8 rows times int8 weights: one graph, at no place of any model, for all sizes.

Such layers stay the host's within other graphs (`host_layer`), which may compute them by this one
(`choices.int8_products`).
"""

from __future__ import annotations

from typing import Any

import torch

from ..contract import InputSpec, RegionSpec, Symbol
from ..device.gpu import has_int8_cores, is_gpu, kind_of
from ..kernels import int8_sums
from ..plans.family import Family
from ..plans.plan import Form, Place, Plan
from ..plans.specs import describe_place
from ..torch_api import compiling

NAME = "int8_product"
LABEL = "int8 product"
#: Sides are multiples of 16; wider rows overflow a 32-bit sum. Kernels are tuned for feed-forwards.
_SIXTEEN = 16
SYMBOLS = {
    s.name: s
    for s in (
        Symbol("rows", 1, 2**22, 4352),
        Symbol("columns", 1, 2**16, 768),
        Symbol("width", 1, 2**13, 256),
    )
}


class Product(Form):
    """Rows by a weight, both scaled by row, and a bias of the result's dtype (`int8_sums`)."""

    family = NAME
    name = "product"

    def label(self, module: Any) -> str:
        return LABEL

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (
            InputSpec("rows", "int8", ("rows", "width", _SIXTEEN)),
            InputSpec("scales", "float32", ("rows", 1)),
            InputSpec("weight", "int8", ("columns", _SIXTEEN, "width", _SIXTEEN)),
            InputSpec("weight_scales", "float32", ("columns", _SIXTEEN)),
            InputSpec("bias", dtype, ("columns", _SIXTEEN)),
        )

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        """Plain maths, replaced by our kernel when traced for a GPU."""
        is_traced = torch.compiler.is_exporting()
        if is_traced and is_gpu(inputs[0].device) and compiling.launches_own_kernels():
            from ..kernels.int8_product import OPERATOR  # needs Triton

            return OPERATOR(*inputs)  # type: ignore[no-any-return]
        return int8_sums.multiply(*inputs)


FORMS: dict[str, Form] = {form.name: form for form in (Product(),)}


def is_for(device: torch.device) -> bool:
    """Tell whether the graph for a device would be our kernel."""
    return (
        kind_of(device).has_packed_kernels
        and has_int8_cores(device)
        and compiling.launches_own_kernels()
    )


def describe(dtype: torch.dtype, device: str) -> RegionSpec:
    """Describe the kind.

    Args:
        dtype: of the results.
        device: its type, as PyTorch names it.
    """
    place = Place(LABEL, torch.nn.Identity(), FORMS["product"])
    return describe_place(place, Plan(symbols=SYMBOLS), dtype=dtype, device=device)


FAMILY = Family(title="int8 products of all models", roots={}, forms=FORMS)
