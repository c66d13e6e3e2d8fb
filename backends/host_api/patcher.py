"""What hangs on a MODEL: wrappers, callbacks, attachments.

Relies on the host's `comfy/patcher_extension.py` and `comfy/model_patcher.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, Literal

#: What a function can wrap, outermost first: a sampler's steps, an evaluation of all conditionings,
#: a batch of them, a call of the model, one of the diffusion model (not everywhere). Names in the
#: host's `WrappersMP`.
Around = Literal[
    "SAMPLER_SAMPLE", "PREDICT_NOISE", "CALC_COND_BATCH", "APPLY_MODEL", "DIFFUSION_MODEL"
]
#: The wrapper of the host's EasyCache, and the file that it is in.
_STEP_CACHE = ("easycache_forward_wrapper", "comfy_extras", "nodes_easycache.py")
#: What the host calls back at. Names of its `CallbacksMP`.
Event = Literal["ON_PRE_RUN", "ON_CLEANUP", "ON_DETACH"]


def clone(patcher: Any) -> Any:
    """Return a clone of a MODEL, sharing weights, wrappers, callbacks."""
    return patcher.clone()


def attach(patcher: Any, key: str, thing: Any) -> None:
    """Attach a thing to a MODEL and its future clones."""
    patcher.set_attachments(key, thing)


def attached(patcher: Any, key: str) -> Any:
    """Return what `attach` attached, or None."""
    return patcher.get_attachment(key)


def wrap(patcher: Any, around: Around, key: str, wrapper: Callable[..., Any]) -> None:
    """Put a function innermost around a place of a MODEL's runs, replacing an earlier one."""
    unwrap(patcher, around, key)
    patcher.add_wrapper_with_key(_wrapper(around), key, wrapper)


def wrap_outermost(patcher: Any, around: Around, key: str, wrapper: Callable[..., Any]) -> None:
    """As `wrap`, outermost."""
    wrap(patcher, around, key, wrapper)
    others = patcher.wrappers[_wrapper(around)]
    patcher.wrappers[_wrapper(around)] = {key: others.pop(key), **others}


def unwrap(patcher: Any, around: Around, key: str) -> None:
    """Remove what `wrap` put there, if it did."""
    patcher.remove_wrappers_with_key(_wrapper(around), key)


def call_back(patcher: Any, event: Event, key: str, callback: Callable[..., None]) -> None:
    """Have the host call a function, replacing an earlier one, with the MODEL that runs (ON_DETACH:
    and whether its weights leave the device).
    """
    call_no_more(patcher, event, key)
    patcher.add_callback_with_key(_callback(event), key, callback)


def call_no_more(patcher: Any, event: Event, key: str) -> None:
    """Remove what `call_back` put there, if it did."""
    patcher.remove_callbacks_with_key(_callback(event), key)


def _wrapper(around: Around) -> str:
    from comfy.patcher_extension import WrappersMP

    name: str = getattr(WrappersMP, around)
    return name


def _callback(event: Event) -> str:
    from comfy.patcher_extension import CallbacksMP

    name: str = getattr(CallbacksMP, event)
    return name


def named_wrappers(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the key and wrapper of all in a call's `transformer_options`."""
    for keyed in options.get("wrappers", {}).values():
        for key, found in keyed.items():
            yield from ((str(key or ""), wrapper) for wrapper in found)


# --- within a wrapper -----------------------------------------------------------------------------


def owner(executor: Any) -> Any:
    """Return whose function a wrapper's executor finally calls."""
    return executor.class_obj


def innermost(executor: Any) -> Callable[..., Any]:
    """Return the function within all wrappers."""
    function: Callable[..., Any] = executor.original
    return function


def put_innermost(executor: Any, function: Callable[..., Any]) -> None:
    """Replace the function within all wrappers."""
    executor.original = function


def wrappers(executor: Any) -> list[Any]:
    """Return all wrappers around a call, the outermost first."""
    found: list[Any] = executor.wrappers
    return found


def wrappers_within(executor: Any) -> list[Any]:
    """Return the wrappers between the running one and the call."""
    found: list[Any] = executor.wrappers[executor.idx + 1 :]
    return found


def are_step_caches(wrappers: list[Any]) -> bool:
    """Tell whether wrappers of the diffusion model are the host's EasyCache."""
    return all(map(_is_step_cache, wrappers))


def _is_step_cache(wrapper: Any) -> bool:
    code = getattr(wrapper, "__code__", None)  # the host may have read its file twice
    if code is None:
        return False
    file = PurePath(code.co_filename)
    return (code.co_name, file.parent.name, file.name) == _STEP_CACHE


def call_innermost(executor: Any, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call through the remaining wrappers, then `wrapper` as if innermost."""
    from comfy.patcher_extension import WrapperExecutor

    around = [*wrappers_within(executor), wrapper]
    run: Callable[..., Any] = WrapperExecutor.new_class_executor(
        executor.original, executor.class_obj, around, 0
    ).execute
    return run


def call_within(executor: Any, whose: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a function, instead of the call's own, within the remaining wrappers.

    Args:
        whose: the object whose function it is, as those wrappers are told.
    """
    from comfy.patcher_extension import WrapperExecutor

    run: Callable[..., Any] = WrapperExecutor.new_class_executor(
        function, whose, executor.wrappers, executor.idx + 1
    ).execute
    return run
