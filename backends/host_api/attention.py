"""The host's attention, and which of PyTorch's kernels it asks for.

Relies on the host's `comfy/ldm/modules/attention.py` (`optimized_attention`, `wrap_attn`;
`ComfyAttention`, `AttentionTensorContainer` and `COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE` of
newer ones) and `comfy/ops.py`
(`SDPA_BACKEND_PRIORITY`, on CUDA alone).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .options import ATTENTION

#: By which a block passes on the part of a layer that may name an attention of its own.
PREFERRED = "preferred_attention"
#: What such a part has without naming one: torch's own, and what a file said of it.
_NAMES_NONE = frozenset(torch.nn.Module().__dict__) | {"config", "training"}


def host_order() -> contextlib.AbstractContextManager[Any]:
    """Let attention use the host's order of kernels.

    Entered for each call, as the host does: torch 2.11 sets an order of its own at a process's
    first attention on Hopper.
    """
    try:
        import comfy.ops
        from torch.nn.attention import sdpa_kernel
    except ImportError:
        return contextlib.nullcontext()
    order = getattr(comfy.ops, "SDPA_BACKEND_PRIORITY", None)
    return sdpa_kernel(order, set_priority=True) if order else contextlib.nullcontext()


def is_plain(options: dict[str, Any], layer: torch.nn.Module | None = None) -> bool:
    """Tell whether these options lead to PyTorch's own attention, not another's choice."""
    from comfy.ldm.modules import attention

    if layer is not None and names_its_own(layer):
        return False
    own = getattr(attention, "attention_pytorch", None)
    return not options.get(ATTENTION) and attention.optimized_attention is own


def chosen(options: dict[str, Any], layer: torch.nn.Module | None = None) -> tuple[Any, ...] | None:
    """Return the functions that attend with these options; None if a layer names its own."""
    from comfy.ldm.modules import attention

    if layer is not None and names_its_own(layer):
        return None
    named = options.get(ATTENTION)
    own = attention.optimized_attention
    return (own,) if not named else (named, own)


def is_layer(module: torch.nn.Module) -> bool:
    """Tell whether a module is the part of a layer that may name its own attention."""
    return type(module) is _of_the_host("ComfyAttention")


def names_its_own(layer: torch.nn.Module) -> bool:
    """Tell whether such a part names one, or holds anything unknown."""
    return any(
        value is not None for name, value in layer.__dict__.items() if name not in _NAMES_NONE
    )


def is_container(value: Any) -> bool:
    """Tell whether a query, key or value is in the host's container, which hands over ownership."""
    return type(value) is _of_the_host("AttentionTensorContainer")


def _of_the_host(name: str) -> Any:
    """A newer host's name; on an older one a placeholder equal to nothing."""
    return getattr(sys.modules.get("comfy.ldm.modules.attention"), name, _of_the_host)


@contextlib.contextmanager
def answered_by(function: Callable[..., Any]) -> Iterator[None]:
    """Put a function under each name of the host's attention: as an option it would not see every
    argument. For a worker, while it traces.
    """
    chosen = replaceable()
    places: list[tuple[dict[str, Any], str]] = []
    for module in list(sys.modules.values()) if chosen is not None else ():
        names = getattr(module, "__dict__", {})
        places += [(names, name) for name, value in list(names.items()) if value is chosen]
    for names, name in places:
        names[name] = function
    try:
        yield
    finally:
        for names, name in places:
            names[name] = chosen


def replaceable() -> Callable[..., Any] | None:
    """Return the attention chosen by flags; None if a pack's, which options cannot override."""
    from comfy.ldm.modules import attention

    chosen: Callable[..., Any] = attention.optimized_attention
    code = getattr(chosen, "__code__", None)
    return chosen if code is not None and ATTENTION in code.co_consts else None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    heads: int,
    *,
    split: bool,
    low_precision: bool,
    contained: bool = False,
    layer: torch.nn.Module | None = None,
    options: dict[str, Any],
    precision: torch.dtype | None = None,
    grouped: bool = False,
    heads_first: bool = False,
) -> torch.Tensor:
    """Call the host's attention with these options.

    Args:
        query: [batch, rows, heads * width], or [batch, heads, rows, width] where `split`.
        key, value: likewise; rows are the keys'.
        mask: added to the products; None, or the host's object for LTX' guides.
        low_precision: whether the host may choose a kernel of fewer bits (0.33 and newer).
        contained: whether the block hands over its tensors in containers (0.33 and newer).
        layer: the part of a layer that may name its own attention (0.35 and newer).
        options: the block's `transformer_options`.
        precision: the dtype to compute in, by a model's settings (SD2's), or None.
        grouped: whether several heads may share a key and a value.
        heads_first: the order of the result.

    Returns:
        [batch, rows, heads * width], or [batch, heads, rows, width] where `heads_first`.
    """
    from comfy.ldm.modules import attention

    if mask is not None and not isinstance(mask, torch.Tensor):
        own = _of_guides(mask)
        return own._attention_with_guide_mask(  # type: ignore[no-any-return]
            query, key, value, heads, mask, precision, options
        )
    more: dict[str, Any] = {} if low_precision else {"low_precision_attention": False}
    if precision is not None:
        more["attn_precision"] = precision
    if grouped:
        more["enable_gqa"] = True
    if heads_first:
        more["skip_output_reshape"] = True
    if layer is not None:
        more[PREFERRED] = layer
    given: Any = (query, key, value)
    if contained:
        given = map(attention.AttentionTensorContainer, given)
    result: torch.Tensor = attention.optimized_attention(
        *given, heads, mask, skip_reshape=split, transformer_options=options, **more
    )
    return result


def call(
    function: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: int,
    layer: torch.nn.Module | None,
) -> torch.Tensor:
    """Call an attention function as the block that was given it (Qwen-Image 2.1's, 0.37 and newer).

    Args:
        query, key, value: [batch, rows, heads * width]; passed as `[batch, rows, heads, width]`.
        layer: as `attend`'s.

    Returns:
        [batch, rows, heads * width].
    """
    parts = (part.view(*part.shape[:2], heads, -1) for part in (query, key, value))
    return function(*parts, heads, **{PREFERRED: layer})


def of_eight_bits(layer: torch.nn.Module) -> Callable[..., torch.Tensor] | None:
    """Return what options name where the host's code attends in eight bits because a layer's
    weight has them (H3's VAE, 0.36 and newer); None elsewhere.
    """
    import comfy.ops
    from comfy.ldm.modules import attention

    is_there = getattr(attention, "COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE", False)
    is_of_them = isinstance(layer.weight, comfy.ops.QuantizedTensor)
    return in_eight_bits if is_there and is_of_them else None


def in_eight_bits(
    _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **named: Any
) -> torch.Tensor:
    """Attend by the library's kernel: `[batch, heads, rows, width]` to `[batch, rows, heads *
    width]`.
    """
    import comfy.quant_ops

    result: torch.Tensor = comfy.quant_ops.ck.int8_attention(query, key, value)
    return result.transpose(1, 2).flatten(2)


@contextlib.contextmanager
def named_by(options: dict[str, Any], function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Have options, which name no attention yet, name this function instead of PyTorch's."""
    options[ATTENTION] = function
    try:
        yield
    finally:
        options.pop(ATTENTION, None)


def is_of_queries_alone(named: dict[str, Any]) -> bool:
    """Tell whether these further arguments leave plain attention: no mask, scale or other order."""
    plain = {"mask": None, "skip_reshape": False, "low_precision_attention": True}
    told = named.keys() - {"transformer_options", "_inside_attn_wrapper"}
    return all(name in plain and named[name] is plain[name] for name in told)


def may_attend_under(mask: Any) -> bool:
    return mask is None or isinstance(mask, torch.Tensor) or _of_guides(mask) is not None


def _of_guides(mask: Any) -> Any:
    """The host's module with this mask class (LTX): a mask per group of queries."""
    module = sys.modules.get("comfy.ldm.lightricks.model")
    known = type(mask) is getattr(module, "GuideAttentionMask", _of_guides)
    return module if known and hasattr(module, "_attention_with_guide_mask") else None
