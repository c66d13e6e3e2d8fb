"""The host's dynamic VRAM: a range of pages per model, a place in it per layer.

Relies on the host's `comfy/ops.py` (`cast_modules_with_vbar`, `resolve_cast_module_with_vbar`),
`comfy/model_prefetch.py`, `comfy/model_patcher.py` (`ModelPatcherDynamic`), the loaded models of
`comfy/model_management.py` and `comfy_aimdo/model_vbar.py`. A layer has its place in `_v`;
`_v_signature` names the pages filled there, `_v_weight` and `_v_bias` lie in them, and `_prefetch`
holds the host's notes while a copy is under way.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import formats

_NONE: dict[Any, Any] = {}
#: Of ranges that `hold` holds: how many bytes from their start are never taken for room.
_floors: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
#: In place of the host's notes of what it fetched, for a layer of which it has none.
_NOT_THERE: dict[str, Any] = {"signature": None, "resident": False}


# --- a layer's place ------------------------------------------------------------------------------


def has_place(layer: Any) -> bool:
    return "_v" in layer.__dict__


def place(layer: Any) -> tuple[int, int]:
    """Return the address and size (bytes) of a layer's place."""
    return int(layer._v[1]), int(layer._v[2])


def mark(layer: Any) -> Any:
    """Return a token of the pages that hold a layer's weights; None if there are none."""
    return layer.__dict__.get("_v_signature")


def mark_empty(layer: Any) -> None:
    """Have the host copy a layer's weights again."""
    layer._v_signature = None


def are_filled(layers: Sequence[Any]) -> bool:
    """Tell whether each layer's weights lie in its place now."""
    import comfy_aimdo.model_vbar as vbar

    for layer in layers:
        if layer._v_signature is None:
            return False
        now = vbar.vbar_fault(layer._v)
        if now is None:
            return False
        good = vbar.vbar_signature_compare(now, layer._v_signature)
        vbar.vbar_unpin(layer._v)
        if not good:
            return False
    return True


# --- bringing weights over ------------------------------------------------------------------------


def is_begun(layer: Any) -> bool:
    """Tell whether a copy of a layer's weights has begun and not ended."""
    return "_prefetch" in layer.__dict__


def holds_pages(layer: Any) -> bool:
    """Tell whether the host holds the pages of a layer whose copy began."""
    return layer.__dict__.get("_prefetch", _NOT_THERE)["signature"] is not None


def is_there(layer: Any) -> bool:
    """Tell whether a layer whose copy began has its final weights in place."""
    return bool(layer.__dict__.get("_prefetch", _NOT_THERE)["resident"])


def begin_copies(
    layers: Sequence[Any], held: list[Any], dtype: torch.dtype, device: torch.device
) -> Any:
    """Begin to copy the weights of several layers.

    Args:
        held: gets the layers whose pages the host holds, also on failure.

    Returns:
        The stream of the copies, None for the current one.
    """
    import comfy.model_management as management
    import comfy.ops

    with _noting_holds(layers, held):
        return comfy.ops.cast_modules_with_vbar(
            layers, dtype, device, dtype, management.device_supports_non_blocking(device)
        )


def await_copies(device: torch.device, stream: Any) -> None:
    """Have the current stream wait for that of `begin_copies`."""
    import comfy.model_management as management

    management.sync_stream(device, stream)


def end_copy(layer: Any, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """Return the weight and bias of a layer whose copy began; quantised ones stay so."""
    import comfy.ops

    weight, bias = comfy.ops.resolve_cast_module_with_vbar(
        layer, dtype, device, dtype, dtype, formats.of(layer) is not None
    )
    return weight, bias


def lie_in_place(layer: Any, pair: tuple[Any, Any]) -> bool:
    """Tell whether what `end_copy` gave are a layer's pages themselves."""
    return pair[0] is layer._v_weight and pair[1] is layer._v_bias


def forget_copy(layer: Any) -> None:
    """As the host does once it has resolved a layer's weights."""
    for name in ("weight_lowvram_function", "bias_lowvram_function"):
        function = getattr(layer, name, None)
        if function is not None:
            function.clear_prepared()
    layer.__dict__.pop("_prefetch", None)


def releaser(held: Sequence[Any], device: torch.device, stream: Any) -> Callable[[], None]:
    """Return a call that releases these layers' pages once the work using them is queued."""
    import comfy.model_management as management
    import comfy_aimdo.model_vbar as vbar

    def release() -> None:
        for layer in held:
            vbar.vbar_unpin(layer._v)
        if stream is not None:
            stream.wait_stream(management.current_stream(device))

    return release


def undo_copy(layer: Any, before: Any) -> None:
    """Have the host repeat all copies of a layer since its `mark`."""
    import comfy_aimdo.model_vbar as vbar

    prefetch = layer.__dict__.get("_prefetch")
    if prefetch is not None:  # broken off before it was resolved: nothing else lets it go
        forget_copy(layer)
        if prefetch["signature"] is not None:
            vbar.vbar_unpin(layer._v)
    was_there = prefetch is None or prefetch.get("resident")
    if not was_there or mark(layer) is not before:
        mark_empty(layer)


class _Noting:
    """A layer's range, noting whether the host holds its pages."""

    def __init__(self, pages: Any) -> None:
        self._pages = pages
        self.held = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pages, name)

    def fault(self, address: int, size: int) -> Any:
        signature = self._pages.fault(address, size)
        self.held = signature is not None
        return signature


@contextlib.contextmanager
def _noting_holds(layers: Sequence[Any], held: list[Any]) -> Iterator[None]:
    """Add to `held` the layers whose pages the host holds afterwards, also on failure."""
    places = [layer._v for layer in layers]
    notes = [_Noting(where[0]) for where in places]
    try:
        for layer, where, note in zip(layers, places, notes, strict=True):
            layer.__dict__["_v"] = (note, *where[1:])  # a module looks among its parameters first
        yield
    finally:
        for layer, where, note in zip(layers, places, notes, strict=True):
            layer.__dict__["_v"] = where
            if note.held:
                held.append(layer)


# --- a model's whole range ------------------------------------------------------------------------


def page_range(model: Any, device: torch.device) -> tuple[Any, int]:
    """Return a model's range and its used bytes; 0 without one."""
    pages = getattr(model, "dynamic_vbars", _NONE).get(device)
    return (None, 0) if pages is None else (pages, pages.offset)


def hold(pages: Any, size: int) -> bytes | None:
    """Bring in and hold the first `size` bytes of a range; `let_go` must follow.

    Returns:
        A token, equal for equal pages; None if they do not all fit.
    """
    signature = pages.fault(pages.base_addr, size)
    if signature is None:
        return None
    # Without this floor, requests for memory would mark held pages for removal. It is not enough:
    # the host drops all floors when a node ends, even while another card's thread computes.
    _floors[pages] = size
    pages.set_watermark_limit(size)
    return bytes(signature)


def give_up(pages: Any, size: int) -> None:
    """Return the last `size` bytes of a range that nobody holds to the device. They stay empty
    until the model is loaded again.
    """
    pages.free_memory(size)


def let_go(pages: Any, size: int) -> None:
    """Release the pages that `hold` holds."""
    _floors.pop(pages, None)
    pages.set_watermark_limit(0)
    pages.unpin(pages.base_addr, size)


@contextlib.contextmanager
def no_page_taken(device: torch.device) -> Iterator[None]:
    """Keep every model's pages on a device.

    comfy-aimdo takes pages when memory is asked for, after waiting for the device: a fault during a
    capture, after which freeing the capture's memory ends the process.
    """
    import comfy.model_management as management

    models = [each.real_model() for each in management.current_loaded_models if each.real_model]
    ranges = [pages for model in models if (pages := page_range(model, device)[0]) is not None]
    for pages in ranges:
        pages.set_watermark_limit(pages.max_size)
    try:
        yield
    finally:
        for pages in ranges:
            pages.set_watermark_limit(_floors.get(pages, 0))
