"""What the host's own functions give for a module's weights, where and as it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..host_api import casting, dynamic_vram
from ..host_api.layers import has_functions, is_stored

#: Weights of so few bytes come on the stream that computes: norms' scales. The host has two streams
#: for weights, and a turn on one of them waits for what was queued before the last turn: a large
#: product's weights would come only once the block before is done.
SMALL_BYTES = 2**16


def is_dynamic(module: Any, device: torch.device) -> bool:
    """Tell whether a module's weights come to the device by the host's dynamic VRAM."""
    if not dynamic_vram.has_place(module):
        return False
    weight = getattr(module, "weight", None)
    return weight is not None and not same_device(weight.device, device)


def same_device(a: torch.device, b: torch.device) -> bool:
    """Tell whether two devices are one, index 0 being meant where none is given."""
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def fetch_plain(
    module: Any, device: torch.device, dtype: torch.dtype, *, always_copies: bool = False
) -> tuple[str, tuple[Any, Any], Callable[[], None] | None]:
    """A module's weights by the host's function for one module.

    Args:
        always_copies: whether what the host brings over is copied, wherever it put it: what it
            gives under dynamic VRAM does not show where that is.

    Returns:
        Their class, (weight, bias), and what to call once the work that uses them is queued.
    """
    weight, bias = module.weight, module.bias
    here = same_device(weight.device, device) and (bias is None or same_device(bias.device, device))
    casts = weight.dtype != dtype or (bias is not None and bias.dtype != dtype)
    if here and not casts and not has_functions(module):
        return "resident", (weight, bias), None
    if not here and not always_copies and _bytes(weight) + _bytes(bias) <= SMALL_BYTES:
        return "streamed", casting.cast_in_order(module, dtype, device), None
    weight, bias, token = casting.cast(module, dtype, device)
    if here:
        casting.let_go(module, weight, bias, token)
        return "cast", (weight, bias), None
    if always_copies or casting.is_in_buffer(token):
        # The next cast on this stream writes over the buffer; a region needs all its weights at
        # once.
        copies = (weight.clone(), None if bias is None else bias.clone())
        casting.let_go(module, weight, bias, token)
        return "streamed", copies, None
    return "streamed", (weight, bias), lambda: casting.let_go(module, weight, bias, token)


def fetch_loose(parameter: Any, device: torch.device, dtype: torch.dtype) -> tuple[str, Any]:
    """A parameter that is no layer's, and its class: the host's blocks bring such a one over by
    themselves, as what it is added to or multiplied with.

    Args:
        dtype: what the graph takes; another one only where nothing computes in the parameter's.
    """
    if not isinstance(parameter, torch.Tensor):
        return "resident", parameter
    to = dtype if is_stored(parameter.dtype) else parameter.dtype
    here = same_device(parameter.device, device)
    if here and to == parameter.dtype:
        return "resident", parameter
    return "cast" if here else "streamed", parameter.to(device).to(to)


def fetch_dynamic(
    modules: list[Any], device: torch.device, dtype: torch.dtype
) -> tuple[dict[int, tuple[Any, Any]], bool, Callable[[], None]]:
    """The weights of several modules in dynamic VRAM, in one call of the host's functions.

    Returns:
        {id(module): (weight, bias)}, whether all of them stay where they are after the call, and
        what to call once the work that uses them is queued.

    Raises:
        ValueError: there is not even room to bring all of them over at once.
    """
    fresh = [m for m in modules if not dynamic_vram.is_begun(m)]
    found: dict[int, tuple[Any, Any]] = {}
    stream = None
    failure: Exception | None = None
    held = [m for m in modules if dynamic_vram.holds_pages(m)]
    try:
        stream = dynamic_vram.begin_copies(fresh, held, dtype, device)
        dynamic_vram.await_copies(device, stream)
        for module in modules:
            found[id(module)] = dynamic_vram.end_copy(module, dtype, device)
    except Exception as error:  # of whatever sort: what is held has to be let go
        failure = error
        for module in modules:
            # The host notes a page as good before a LoRA is applied to what lies there.
            if not dynamic_vram.is_there(module):
                dynamic_vram.mark_empty(module)
    for module in fresh:
        dynamic_vram.forget_copy(module)
    release = dynamic_vram.releaser(held, device, stream)
    if failure is not None:
        release()
        if not isinstance(failure, (RuntimeError, MemoryError)):
            raise failure
        raise ValueError(f"they could not be brought over together: {failure}") from failure
    stays = len(held) == len(modules) and all(
        dynamic_vram.lie_in_place(m, found[id(m)]) for m in modules
    )
    return found, stays, release


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
