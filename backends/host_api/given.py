"""Which of the host's quantised layers are no more than a product by weights that one has.

Relies on the host's `comfy/ops.py` (`mixed_precision_ops`). Nothing of a graph hangs on it, so keys
do not hold it.
"""

from __future__ import annotations

import logging
from types import CodeType
from typing import Any

import torch

from . import formats, gguf
from .layers import rounds_inputs_to, takes_rounded
from .present import names_in

logger = logging.getLogger(__name__)

#: The names in the code of a call of a quantised layer, where it is the known one: another version
#: of the host may do more with an input than multiply it.
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


def multiplies_as_given(layer: Any, dtype: torch.dtype, *, rounded: bool) -> bool:
    """Tell whether a call of a layer is, at this moment, no more than the product of its input by
    its weights as they are stored: who has these may multiply without the layer.

    Args:
        dtype: of the input.
        rounded: whether the input comes rounded, as the format has it.
    """
    if gguf.blocks_of(layer) is not None:
        return not rounded
    if not _calls_as_known(layer.__class__):
        return False
    weight, bias = layer.weight, layer.bias
    return (
        layer.__dict__.keys().isdisjoint(_NAMED)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and takes_rounded(layer)
        and getattr(layer, "pre_quant_scale", None) is None
        and _multiplies(layer, weight, rounded=rounded)
        and weight.dtype is dtype
        and (bias is None or bias.dtype is dtype)
    )


def _multiplies(layer: Any, weight: Any, *, rounded: bool) -> bool:
    """Tell whether a product by this weight is what a layer computes."""
    form = formats.of(layer)
    if form is None:  # one of a quantised file's that is not
        return not rounded and type(weight) in (torch.Tensor, torch.nn.Parameter)
    return (
        (rounds_inputs_to(layer) is not None if rounded else form.quantises_rows)
        and not layer._full_precision_mm
        and getattr(weight, "_layout_cls", None) == form.layout
    )


#: Of code objects, by their ids, whether no name in them is unknown: the host makes a class for
#: each file that it loads, all of the same code. They are kept, so that an id stays its own.
_answers: dict[tuple[int, ...], tuple[list[CodeType], bool]] = {}


def _calls_as_known(cls: Any) -> bool:
    """Tell whether a class is the host's for quantised products, and its code of a call names
    nothing that is not known.
    """
    found = [getattr(getattr(cls, name, None), "__code__", None) for name in _NAMED]
    codes = [code for code in found if code is not None]
    if cls.__module__ != "comfy.ops" or len(codes) < len(found):
        return False
    asked = tuple(map(id, codes))
    if asked not in _answers:
        _answers[asked] = codes, _are_known(codes)
    return _answers[asked][1]


def _are_known(codes: list[CodeType]) -> bool:
    for code, known in zip(codes, _NAMED.values(), strict=True):
        unknown = set(names_in(code)) - known
        if unknown:
            logger.info(
                "this ComfyUI's quantised layers are called as they are: %s names %s",
                code.co_name,
                min(unknown),
            )
            return False
    return True
