"""What the host's own functions give for a module's weights, where and as it computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

#: In place of the host's notes of what it fetched, for a module of which it has none.
_NOT_THERE: dict[str, Any] = {"signature": None, "resident": False}


def is_dynamic(module: Any, device: torch.device) -> bool:
    """Tell whether a module's weights come to the device by the host's dynamic VRAM."""
    weight = getattr(module, "weight", None)
    return hasattr(module, "_v") and weight is not None and not same_device(weight.device, device)


def same_device(a: torch.device, b: torch.device) -> bool:
    """Tell whether two devices are one, index 0 being meant where none is given."""
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def fetch_plain(
    module: Any, device: torch.device, dtype: torch.dtype
) -> tuple[str, tuple[Any, Any], Callable[[], None] | None]:
    """A module's weights the old way; see `comfy.ops.cast_bias_weight`.

    Returns:
        Their class, (weight, bias), and what to call once the work that uses them is queued.
    """
    import comfy.ops

    weight, bias = module.weight, module.bias
    functions = bool(module.weight_function) or bool(module.bias_function)
    here = same_device(weight.device, device) and (bias is None or same_device(bias.device, device))
    casts = weight.dtype != dtype or (bias is not None and bias.dtype != dtype)
    if here and not functions and not casts:
        return "resident", (weight, bias), None
    weight, bias, token = comfy.ops.cast_bias_weight(
        module,
        dtype=dtype,
        device=device,
        bias_dtype=dtype,
        offloadable=True,
    )
    if here:
        comfy.ops.uncast_bias_weight(module, weight, bias, token)
        return "cast", (weight, bias), None
    if _reuses_buffers(token):
        # The next cast on this stream writes over the buffer; a region needs all its weights at
        # once.
        copies = (weight.clone(), None if bias is None else bias.clone())
        comfy.ops.uncast_bias_weight(module, weight, bias, token)
        return "streamed", copies, None
    return (
        "streamed",
        (weight, bias),
        lambda: comfy.ops.uncast_bias_weight(module, weight, bias, token),
    )


def _reuses_buffers(token: Any) -> bool:
    from comfy.cli_args import args

    return token is not None and token[0] is not None and not args.cuda_malloc


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
    import comfy.model_management as management
    import comfy.ops
    import comfy_aimdo.model_vbar

    fresh = [m for m in modules if not hasattr(m, "_prefetch")]
    found: dict[int, tuple[Any, Any]] = {}
    stream = None
    failure: Exception | None = None
    held = [m for m in modules if getattr(m, "_prefetch", _NOT_THERE)["signature"] is not None]
    try:
        with _noting_holds(fresh, held):
            stream = comfy.ops.cast_modules_with_vbar(
                fresh, dtype, device, dtype, management.device_supports_non_blocking(device)
            )
        management.sync_stream(device, stream)
        for module in modules:
            found[id(module)] = comfy.ops.resolve_cast_module_with_vbar(
                module, dtype, device, dtype, None, False
            )
    except Exception as error:  # of whatever sort: what is held has to be let go
        failure = error
        for module in modules:
            # The host notes a page as good before a LoRA is applied to what lies there.
            if not getattr(module, "_prefetch", _NOT_THERE)["resident"]:
                module._v_signature = None
    for module in fresh:
        forget_prefetch(module)

    def release() -> None:
        for module in held:
            comfy_aimdo.model_vbar.vbar_unpin(module._v)
        if stream is not None:
            stream.wait_stream(management.current_stream(device))

    if failure is not None:
        release()
        if not isinstance(failure, (RuntimeError, MemoryError)):
            raise failure
        raise ValueError(f"they could not be brought over together: {failure}") from failure
    stays = len(held) == len(modules) and all(
        found[id(m)][0] is m._v_weight and found[id(m)][1] is m._v_bias for m in modules
    )
    return found, stays, release


class _Noting:
    """A module's range of dynamic VRAM, which notes whether the host holds its pages."""

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
def _noting_holds(modules: Sequence[Any], held: list[Any]) -> Iterator[None]:
    """Add to `held` the modules whose pages the host holds afterwards, also when it fails: it says
    so on the module last of all.
    """
    places = [module._v for module in modules]
    notes = [_Noting(place[0]) for place in places]
    try:
        for module, place, note in zip(modules, places, notes, strict=True):
            module._v = (note, *place[1:])
        yield
    finally:
        for module, place, note in zip(modules, places, notes, strict=True):
            module._v = place
            if note.held:
                held.append(module)


def forget_prefetch(module: Any) -> None:
    """As the host does once it has resolved a module's weights."""
    for name in ("weight_lowvram_function", "bias_lowvram_function"):
        function = getattr(module, name, None)
        if function is not None:
            function.clear_prepared()
    module.__dict__.pop("_prefetch", None)
