"""Which of the host's quantised layers are no more than a product by weights that one has.

Relies on the host's `comfy/ops.py` (`mixed_precision_ops`). Nothing of a graph hangs on it, so keys
do not hold it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from . import kitchen
from .layers import quantised_as, rounds_inputs_to, takes_rounded
from .present import names_in

#: The names in the code of a call of a quantised layer, where it is the known one: another version
#: of the host may do more with an input than multiply it.
_NAMED = {
    "forward": frozenset(
        (
            "QUANT_ALGOS",
            "QuantLinearFunc",
            "QuantizedTensor",
            "_full_precision_mm",
            "apply",
            "bias_function",
            "cast_bias_weight",
            "cast_to_device",
            "comfy",
            "comfy_force_cast_weights",
            "compute_dtype",
            "device",
            "dtype",
            "forward_comfy_cast_weights",
            "from_float",
            "get",
            "getattr",
            "input_scale",
            "isinstance",
            "layout_type",
            "len",
            "model_management",
            "ndim",
            "offloadable",
            "pre_quant_scale",
            "quant_format",
            "quantize_input",
            "requires_grad",
            "reshape",
            "run_every_op",
            "scale",
            "shape",
            "uncast_bias_weight",
            "want_requant",
            "weight",
            "weight_function",
            "weight_only_quant",
        )
    ),
    "forward_comfy_cast_weights": frozenset(
        (
            "_forward",
            "bias_dtype",
            "cast_bias_weight",
            "compute_dtype",
            "device",
            "dtype",
            "input",
            "offloadable",
            "to",
            "uncast_bias_weight",
            "want_requant",
            "weight",
        )
    ),
    "_forward": frozenset(("functional", "linear", "nn", "torch")),
}


def multiplies_as_given(layer: Any, dtype: torch.dtype, *, rounded: bool) -> bool:
    """Tell whether a call of a layer is, at this moment, no more than the product of its input by
    its weights as they are stored: who has these may multiply without the layer.

    Args:
        dtype: of the input.
        rounded: whether the input comes rounded, as the format has it.
    """
    if not _calls_as_known(layer.__class__):
        return False
    from comfy.quant_ops import QuantizedTensor

    takes = rounds_inputs_to(layer) is not None if rounded else quantised_as(layer) == kitchen.INT8
    weight, bias = layer.weight, layer.bias
    return (
        takes
        and layer.__dict__.keys().isdisjoint(_NAMED)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and takes_rounded(layer)
        and not layer._full_precision_mm
        and getattr(layer, "pre_quant_scale", None) is None
        and isinstance(weight, QuantizedTensor)
        and weight.dtype is dtype
        and (bias is None or bias.dtype is dtype)
    )


@cache
def _calls_as_known(cls: Any) -> bool:
    """Tell whether a class is the host's for quantised products, and its code of a call names
    nothing that is not known.
    """
    codes = [getattr(getattr(cls, name, None), "__code__", None) for name in _NAMED]
    return cls.__module__ == "comfy.ops" and all(
        code is not None and known.issuperset(names_in(code))
        for code, known in zip(codes, _NAMED.values(), strict=True)
    )
