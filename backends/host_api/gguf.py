"""Layers with GGUF weights: of the pack ComfyUI-GGUF, over the host's classes.

Relies on that pack's `ops.py` (`GGMLLayer`, `GGMLTensor`). A class whose code names anything
unknown is treated as any pack's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .dynamic_vram import has_place
from .known_calls import KnownCalls

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
_CALLS = KnownCalls("layers for GGUF files", _NAMED)
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


class Blocks(NamedTuple):
    """A weight in blocks.

    Attributes:
        form: the name of its format.
        values: the bytes, as a plain tensor over the same memory.
        shape: of the unpacked weight.
        steps: what each step of unpacking is rounded to; None: to the dtype of the product.
        bias: of the layer, as a plain tensor, never packed.
    """

    form: str
    values: torch.Tensor
    shape: torch.Size
    steps: torch.dtype | None
    bias: torch.Tensor | None


def blocks_of(layer: Any) -> Blocks | None:
    """Return the weight of a layer whose call is now just a product by it; None otherwise: with a
    LoRA added at each call, or under dynamic VRAM, where another version of the pack fetches the
    weight.
    """
    return None if _is_patched(layer, "weight") else patched_blocks_of(layer)


def patched_blocks_of(layer: Any) -> Blocks | None:
    """Return the same also if a LoRA changes the weight first (`change_of`)."""
    weight: Any = getattr(layer, "weight", None)
    form = FORMATS.get(getattr(weight, "tensor_type", -1))
    if form is None or has_place(layer) or not _is_product(layer) or _is_patched(layer, "bias"):
        return None
    steps = layer.dequant_dtype
    steps = torch.float16 if steps is None else None if steps == "target" else steps
    bias = None if layer.bias is None else _plain(layer.bias)
    return Blocks(form, _plain(weight), torch.Size(weight.tensor_shape), steps, bias)


def change_of(layer: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what applies a layer's LoRA to its unpacked weight, perhaps in place, or None."""
    if not _is_patched(layer, "weight"):
        return None

    def change(weight: torch.Tensor) -> torch.Tensor:
        from comfy.lora import calculate_weight

        found, keys = zip(*layer.weight.patches, strict=True)
        patches = [patch for some in found for patch in some]
        dtype = getattr(layer, "patch_dtype", None)
        computed_in = () if dtype is None else (weight.dtype if dtype == "target" else dtype,)
        changed: torch.Tensor = calculate_weight(patches, weight, keys[-1], *computed_in)
        return changed.to(weight.dtype)

    return change


def plain_parts(layer: Any) -> dict[str, torch.Tensor]:
    """Return such a layer's parameters by name, as plain tensors over the same memory; else {}."""
    blocks = blocks_of(layer)
    if blocks is None:
        return {}
    parts = {"weight": blocks.values, "bias": blocks.bias}
    return {name: part for name, part in parts.items() if part is not None}


def host_class(layer: torch.nn.Module) -> type:
    """Return the class that a layer computes by: the host's, if the pack's only adds handling of
    packed weights and this layer has none.
    """
    cls = type(layer)
    if not isinstance(layer, _OTHERS) or not _CALLS.are_of(cls):
        return cls
    plain = (torch.Tensor, torch.nn.Parameter, type(None))
    if any(type(weight) not in plain for weight in (layer.weight, layer.bias)):
        return cls
    return next(base for base in cls.__mro__ if base.__module__ == "comfy.ops")


def _is_patched(layer: Any, name: str) -> bool:
    return bool(getattr(getattr(layer, name, None), "patches", None))


def _plain(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.detach().as_subclass(torch.Tensor)
    return found


def _is_product(layer: Any) -> bool:
    return (
        isinstance(layer, torch.nn.Linear)
        and _CALLS.are_of(type(layer))
        and _CALLS.is_untouched(layer)
    )
