"""Which of the host's quantised layers are just a product by weights at hand.

Relies on the host's `comfy/ops.py` (`mixed_precision_ops`). No graph depends on it, nor does any
key.
"""

from __future__ import annotations

from typing import Any

import torch

from . import formats, gguf
from .known_calls import KnownCalls
from .layers import rounds_inputs_to, takes_rounded

#: All names in the known code of a quantised layer's call: another host version may do more.
_NAMED = {
    "forward": frozenset(
        (
            "CastBiasWeightContext",
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
            "CastBiasWeightContext",  # newer, as the next four
            "QuantizedTensor",
            "_full_precision_mm",
            "dequantize",
            "isinstance",
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
_CALLS = KnownCalls("this ComfyUI's quantised layers", _NAMED)


def multiplies_as_given(layer: Any, dtype: torch.dtype, *, rounded: bool) -> bool:
    """Tell whether a layer's call is now just its input times its stored weights, so that it may be
    computed without the layer.

    Args:
        dtype: of the input.
        rounded: whether the input comes rounded, as the format has it.
    """
    if gguf.blocks_of(layer) is not None:
        return not rounded
    if layer.__class__.__module__ != "comfy.ops" or not _CALLS.are_of(layer.__class__):
        return False
    weight, bias = layer.weight, layer.bias
    return (
        _CALLS.is_untouched(layer)
        and takes_rounded(layer)
        and getattr(layer, "pre_quant_scale", None) is None
        and _multiplies(layer, weight, rounded=rounded)
        and weight.dtype is dtype
        and (bias is None or bias.dtype is dtype)
    )


def _multiplies(layer: Any, weight: Any, *, rounded: bool) -> bool:
    """Tell whether the layer computes a product by this weight."""
    form = formats.of(layer)
    if form is None:  # one of a quantised file's that is not
        return not rounded and type(weight) in (torch.Tensor, torch.nn.Parameter)
    return (
        (rounds_inputs_to(layer) is not None if rounded else form.quantises_rows)
        and not layer._full_precision_mm
        and getattr(weight, "_layout_cls", None) == form.layout
    )
