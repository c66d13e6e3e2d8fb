"""Layers with weights out of GGUF files: not the host's, but of the pack that people load such
files with (ComfyUI-GGUF), over the host's classes.

Relies on that pack's `ops.py` (`GGMLLayer`, `GGMLTensor`). A class whose code names anything that
is not known here is any pack's.
"""

from __future__ import annotations

import logging
from types import CodeType
from typing import Any, NamedTuple

import torch

from .present import names_in

logger = logging.getLogger(__name__)

#: The names in the code of a call, by method; another version may do more than it says here.
_NAMED = {
    "forward_ggml_cast_weights": frozenset(
        (
            *("cast_bias_weight", "torch", "nn", "functional", "linear", "layer_norm"),
            *("weight", "super", "__class__", "forward_comfy_cast_weights"),
            *("normalized_shape", "eps", "_conv_forward", "group_norm", "num_groups"),
        )
    ),
    "forward_comfy_cast_weights": frozenset(
        (
            *("is_ggml_quantized", "forward_ggml_cast_weights", "super", "__class__"),
            *("forward_comfy_cast_weights", "isinstance", "GGMLTensor", "torch", "Tensor"),
        )
    ),
    "cast_bias_weight": frozenset(
        (
            *("getattr", "torch", "float32", "dtype", "device", "comfy", "model_management"),
            *("device_supports_non_blocking", "bias", "get_weight", "to", "ops", "cast_to"),
            *("non_blocking", "copy", "weight"),
        )
    ),
    "get_weight": frozenset(
        (
            *("device", "getattr", "move_patch_to_device", "dequantize_tensor", "dequant_dtype"),
            *("isinstance", "GGMLTensor", "torch", "Tensor", "len", "patch_dtype", "comfy"),
            *("lora", "calculate_weight", "patches", "target"),
        )
    ),
}
_METHODS = tuple(_NAMED)
#: Formats that are known, by the numbers that files have for them (`GGMLQuantizationType`).
FORMATS = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    30: "BF16",
}
#: Layers that the pack has classes of, besides products, for weights that its files seldom have.
_OTHERS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.Conv2d)
#: Methods that such a layer has itself where another node put them there.
_FORWARDS = ("forward", "_forward", *_METHODS)


class Blocks(NamedTuple):
    """A weight in blocks.

    Attributes:
        form: the name of its format.
        values: the bytes, as a plain tensor over the same memory.
        shape: of the weight that they stand for.
        steps: what its layer rounds each step of unpacking to; None: to what it multiplies in.
    """

    form: str
    values: torch.Tensor
    shape: torch.Size
    steps: torch.dtype | None


def blocks_of(layer: Any) -> Blocks | None:
    """Return the weight of a layer whose call is, at this moment, no more than a product by it;
    None for any other: not while a LoRA is added at each call.
    """
    weight: Any = getattr(layer, "weight", None)
    form = FORMATS.get(getattr(weight, "tensor_type", -1))
    if form is None or not _is_product(layer):
        return None
    if getattr(weight, "patches", None) or getattr(layer.bias, "patches", None):
        return None
    steps = layer.dequant_dtype
    steps = torch.float16 if steps is None else None if steps == "target" else steps
    return Blocks(form, _plain(weight), torch.Size(weight.tensor_shape), steps)


def plain_bias(layer: Any) -> torch.Tensor | None:
    """Return the bias of such a layer as a plain tensor; those of files are not packed."""
    return None if layer.bias is None else _plain(layer.bias)


def plain_parts(layer: Any) -> dict[str, torch.Tensor]:
    """Return the parameters of such a layer, by name, as plain tensors over the same memory; none
    of any other's.
    """
    blocks = blocks_of(layer)
    if blocks is None:
        return {}
    bias = plain_bias(layer)
    return {"weight": blocks.values, **({} if bias is None else {"bias": bias})}


def host_class(layer: torch.nn.Module) -> type:
    """Return the class by which a layer computes: the host's own, where the pack's only adds what
    is for packed weights, of which this layer has none; else its own.
    """
    cls = type(layer)
    if not isinstance(layer, _OTHERS) or not _is_known(cls):
        return cls
    plain = (torch.Tensor, torch.nn.Parameter, type(None))
    if any(type(weight) not in plain for weight in (layer.weight, layer.bias)):
        return cls
    return next(base for base in cls.__mro__ if base.__module__ == "comfy.ops")


def _plain(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.detach().as_subclass(torch.Tensor)
    return found


def _is_product(layer: Any) -> bool:
    return (
        isinstance(layer, torch.nn.Linear)
        and _is_known(type(layer))
        and layer.__dict__.keys().isdisjoint(_FORWARDS)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
    )


#: By class. The pack makes its classes once.
_known: dict[type, bool] = {}


def _is_known(cls: type) -> bool:
    """Tell whether a class is the pack's, of a version that is known."""
    if cls not in _known:
        _known[cls] = _looks_known(cls)
    return _known[cls]


def _looks_known(cls: Any) -> bool:
    found = [getattr(getattr(cls, name, None), "__code__", None) for name in _METHODS]
    codes = [code for code in found if isinstance(code, CodeType)]
    if len(codes) < len(found):
        return False
    for code, known in zip(codes, _NAMED.values(), strict=True):
        unknown = set(names_in(code)) - known
        if unknown:
            logger.info(
                "this pack's layers for GGUF files are called as they are: %s names %s",
                code.co_name,
                min(unknown),
            )
            return False
    return True
