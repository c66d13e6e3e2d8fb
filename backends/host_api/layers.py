"""What the host writes on a model's layers, and which of their code only fetches weights.

Relies on the host's `comfy/ops.py` (`CastWeightBiasOp`, `mixed_precision_ops`) and
`comfy/model_patcher.py` (`load`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from . import formats

#: What the host writes on modules while it loads and moves weights. Graphs get final weights, so a
#: twin has none of it and no key depends on it.
STATE = frozenset(
    (
        "comfy_cast_weights",
        "prev_comfy_cast_weights",
        "comfy_patched_weights",
        "weight_function",
        "bias_function",
        "weight_lowvram_function",
        "bias_lowvram_function",
        "weight_comfy_model_dtype",
        "bias_comfy_model_dtype",
        "seed_key",
        "_v",
        "_v_weight",
        "_v_bias",
        "_v_signature",
        "_prefetch",
        "_pin",
        "_pin_state",
    )
)
#: What of it comes to any layer that has weights, and goes.
COMING = ("comfy_patched_weights", "comfy_force_cast_weights")
#: What the host reads on a layer before it fuses more than a product (`linear_input_act`, newer
#: helpers), and values that make it call the layer: no format, a full product, plain tensors.
CALLED_WHOLE: Mapping[str, Any] = {
    "_full_precision_mm": True,
    "_full_precision_mm_config": True,
    "bias_function": (),
    "comfy_force_cast_weights": True,
    "layout_type": None,
    "pre_quant_scale": None,
    "quant_format": None,
    "tensor_class": None,
    "weight_function": (),
}
#: Not part of a graph, which has weights as inputs: they fetch weights or poll for Cancel.
NOT_TRACED = frozenset(
    (
        "run_every_op",
        "cast_bias_weight",
        "uncast_bias_weight",
        "forward_comfy_cast_weights",
        "materialize_meta_param",
    )
)
#: Memory management, whose globals change while the server runs.
MANAGEMENT = (
    "comfy.model_management",
    "comfy.memory_management",
    "comfy.utils",
    "comfy.quant_ops",
)
#: Under these names the host's classes, and torch's, have the code of a call.
FORWARDS = (
    *("forward", "_forward", "_conv_forward"),
    *("forward_pose", "forward_gen", "kv_from_input", "kv"),  # of Wan Animate 2
)


def is_operator(layer: Any) -> bool:
    """Tell whether a layer, or class of layers, has its weights cast to what it computes in."""
    return hasattr(layer, "comfy_cast_weights")


def unpacks_quantised(layer: Any) -> bool:
    """Tell whether a quantised layer multiplies in full by its unpacked weight. Formats that
    quantise their input ignore what a file asks.
    """
    import comfy.quant_ops

    form = formats.of(layer)
    name = None if form is None else form.name
    known = getattr(comfy.quant_ops, "QUANT_ALGOS", {}).get(name, {})
    return bool(getattr(layer, "_full_precision_mm", False)) and known.get("quantize_input", True)


def unpacks_stored(layer: torch.nn.Module) -> bool:
    """Tell whether a host layer casts a plain fp8 weight at each call."""
    weight: Any = getattr(layer, "weight", None)
    if not is_operator(layer) or type(weight) not in (torch.nn.Parameter, torch.Tensor):
        return False
    return is_stored(loaded_dtype(layer, "weight", weight)) and not multiplies_as_stored(layer)


def multiplies_as_stored(layer: torch.nn.Module) -> bool:
    """Tell whether the host multiplies by a layer's plain fp8 weight as stored: the loader's
    "fp8_e4m3fn_fast", `--fast fp8_matrix_mult`.
    """
    weight = getattr(layer, "weight", None)
    if type(layer).__module__ != "comfy.ops" or not isinstance(weight, torch.Tensor):
        return False
    import comfy.ops

    names = formats.plain_layers(loaded_dtype(layer, "weight", weight))
    known = (getattr(getattr(comfy.ops, name, None), "Linear", ()) for name in names)
    return any(isinstance(layer, each) for each in known)


def rounds_inputs_to(layer: Any) -> torch.dtype | None:
    """Return the dtype that a quantised layer rounds each input element to; None if it takes its
    input as it is, or quantises rows or blocks.
    """
    form = formats.of(layer)
    if form is None or (known := form.rounding) is None:
        return None
    rounds = (
        type(layer).__module__ == "comfy.ops"
        and not getattr(layer, "_full_precision_mm", True)
        and getattr(layer, "pre_quant_scale", None) is None
    )
    return known.dtype if rounds and known.is_known(known.dtype) else None


def takes_rounded(layer: Any) -> bool:
    """Tell whether such a layer rounds its input now: not while weights are computed at each call,
    which it unpacks and multiplies in full.
    """
    return not has_functions(layer) and not getattr(layer, "comfy_force_cast_weights", False)


def may_be_multiplied_by(layer: Any) -> bool:
    """Tell whether `multiplying_by` works on a layer."""
    return (
        type(layer).__module__ == "comfy.ops"
        and hasattr(type(layer), "_forward")
        and "_forward" not in layer.__dict__
    )


@contextlib.contextmanager
def multiplying_by(layer: torch.nn.Module, product: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Have a quantised host layer compute `product(input, weight, bias)`, with the weight as
    fetched, instead of torch's `linear`. Entered for each product of a step: keep it cheap.
    """
    layer.__dict__["_forward"] = product
    try:
        yield
    finally:
        layer.__dict__.pop("_forward", None)


@contextlib.contextmanager
def multiplying_in_full(module: torch.nn.Module) -> Iterator[None]:
    """Have a module's host layers multiply in full: the difference is their formats' error."""
    import comfy.ops

    with contextlib.ExitStack() as stack:
        for layer in module.modules():
            if multiplies_as_stored(layer):
                cast = comfy.ops.manual_cast.Linear.forward_comfy_cast_weights
                found: dict[str, Any] = {"forward_comfy_cast_weights": partial(cast, layer)}
            elif formats.of(layer) is not None and may_be_multiplied_by(layer):
                found = {"_full_precision_mm": True, "_forward": _product_in_full}
            else:
                continue
            stack.enter_context(_having(layer, found))
        yield


@contextlib.contextmanager
def _having(layer: torch.nn.Module, attributes: dict[str, Any]) -> Iterator[None]:
    """Give a layer attributes, shadowing its own and its class's."""
    own = {name: layer.__dict__[name] for name in attributes if name in layer.__dict__}
    layer.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del layer.__dict__[name]
        layer.__dict__.update(own)


def _product_in_full(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    from comfy.quant_ops import QuantizedTensor

    if isinstance(weight, QuantizedTensor):
        weight = weight.dequantize()
    return torch.nn.functional.linear(input, weight.to(input.dtype), bias)


def make_final(layer: torch.nn.Module) -> None:
    """Have an operator use its weights as they are, neither cast nor patched."""
    layer.__dict__.update(comfy_cast_weights=False, weight_function=[], bias_function=[])


def has_functions(layer: Any) -> bool:
    """Tell whether the host computes a layer's weights anew at each call."""
    return bool(getattr(layer, "weight_function", None) or getattr(layer, "bias_function", None))


def loaded_dtype(layer: torch.nn.Module, name: str, tensor: torch.Tensor) -> torch.dtype:
    """Return a non-operator's dtype once loaded; until then dynamic VRAM shows the file's."""
    archived = getattr(layer, f"{name}_comfy_model_dtype", None)
    return archived if isinstance(archived, torch.dtype) else tensor.dtype


def is_stored(dtype: torch.dtype) -> bool:
    """Tell whether nothing computes in a dtype; graphs for older GPUs cannot even read it."""
    return dtype.is_floating_point and dtype.itemsize == 1


def own_forward(cls: type) -> Any:
    """Return the function that a call of a root module reaches within its wrappers."""
    return getattr(cls, "_forward", cls.forward)  # type: ignore[attr-defined]


def bound_forward(root: Any) -> Any:
    """Return the method that the host wraps; None if it wraps none: Stable Audio's forward calls
    its `_forward` without wrappers.
    """
    names = getattr(getattr(type(root).forward, "__code__", None), "co_names", ())
    is_bare = "_forward" in names and "WrapperExecutor" not in names
    return None if is_bare else getattr(root, "_forward", None)
