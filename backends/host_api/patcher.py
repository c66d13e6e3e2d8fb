"""What hangs on a MODEL: wrappers around its calls, callbacks, our attachments.

Relies on the host's `comfy/patcher_extension.py` and `comfy/model_patcher.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, Literal

#: A place of a run around which a function can be put: all steps of a sampler, one evaluation of
#: all conditionings, within it those that are asked for together, one call of the model, within it
#: one of the diffusion model, which not all of these let be wrapped. Names of the host's
#: `WrappersMP`.
Around = Literal[
    "SAMPLER_SAMPLE", "PREDICT_NOISE", "CALC_COND_BATCH", "APPLY_MODEL", "DIFFUSION_MODEL"
]
#: The wrapper of the host's EasyCache, and the file that it is in.
_STEP_CACHE = ("easycache_forward_wrapper", "comfy_extras", "nodes_easycache.py")
#: What the host calls back at. Names of its `CallbacksMP`.
Event = Literal["ON_PRE_RUN", "ON_CLEANUP", "ON_DETACH"]


def clone(patcher: Any) -> Any:
    """Return a clone of a MODEL, which shares its weights and its wrappers, callbacks and so on."""
    return patcher.clone()


def attach(patcher: Any, key: str, thing: Any) -> None:
    """Hang a thing on a MODEL, which its clones get too."""
    patcher.set_attachments(key, thing)


def attached(patcher: Any, key: str) -> Any:
    """Return what `attach` hung on a MODEL, or None."""
    return patcher.get_attachment(key)


def wrap(patcher: Any, around: Around, key: str, wrapper: Callable[..., Any]) -> None:
    """Put a function around a place of a MODEL's runs, innermost, in place of an earlier one."""
    unwrap(patcher, around, key)
    patcher.add_wrapper_with_key(_wrapper(around), key, wrapper)


def wrap_outermost(patcher: Any, around: Around, key: str, wrapper: Callable[..., Any]) -> None:
    """As `wrap`, around whatever else is there."""
    wrap(patcher, around, key, wrapper)
    others = patcher.wrappers[_wrapper(around)]
    patcher.wrappers[_wrapper(around)] = {key: others.pop(key), **others}


def unwrap(patcher: Any, around: Around, key: str) -> None:
    """Take away what `wrap` put there, if it did."""
    patcher.remove_wrappers_with_key(_wrapper(around), key)


def call_back(patcher: Any, event: Event, key: str, callback: Callable[..., None]) -> None:
    """Have the host call a function, in place of an earlier one; it is given the MODEL that runs,
    and at ON_DETACH whether its weights leave the device.
    """
    call_no_more(patcher, event, key)
    patcher.add_callback_with_key(_callback(event), key, callback)


def call_no_more(patcher: Any, event: Event, key: str) -> None:
    """Take away what `call_back` put there, if it did."""
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
    """Give all wrappers of a call's `transformer_options`, and the key that each is under."""
    for keyed in options.get("wrappers", {}).values():
        for key, found in keyed.items():
            yield from ((str(key or ""), wrapper) for wrapper in found)


# --- within a wrapper -----------------------------------------------------------------------------


def owner(executor: Any) -> Any:
    """Return whose function a wrapper's executor calls in the end."""
    return executor.class_obj


def innermost(executor: Any) -> Callable[..., Any]:
    """Return the function that is called within all wrappers."""
    function: Callable[..., Any] = executor.original
    return function


def put_innermost(executor: Any, function: Callable[..., Any]) -> None:
    """Have another function called within all wrappers."""
    executor.original = function


def wrappers(executor: Any) -> list[Any]:
    """Return all wrappers around a call, the outermost first."""
    found: list[Any] = executor.wrappers
    return found


def wrappers_within(executor: Any) -> list[Any]:
    """Return the wrappers that lie between the one that runs and the call."""
    found: list[Any] = executor.wrappers[executor.idx + 1 :]
    return found


def are_step_caches(wrappers: list[Any]) -> bool:
    """Tell whether wrappers around the diffusion model's calls are the host's EasyCache: they leave
    a call out, or give it on as it came.
    """
    return all(map(_is_step_cache, wrappers))


def _is_step_cache(wrapper: Any) -> bool:
    code = getattr(wrapper, "__code__", None)  # the host may have read its file twice
    if code is None:
        return False
    file = PurePath(code.co_filename)
    return (code.co_name, file.parent.name, file.name) == _STEP_CACHE


def call_innermost(executor: Any, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes the call with the wrappers that are left around one of ours, which is given
    an executor as if it had been put there last.
    """
    from comfy.patcher_extension import WrapperExecutor

    around = [*wrappers_within(executor), wrapper]
    run: Callable[..., Any] = WrapperExecutor.new_class_executor(
        executor.original, executor.class_obj, around, 0
    ).execute
    return run


def call_within(executor: Any, whose: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a function within the wrappers that are left, in place of the call's own.

    Args:
        whose: the object whose function it is, as those wrappers are told.
    """
    from comfy.patcher_extension import WrapperExecutor

    run: Callable[..., Any] = WrapperExecutor.new_class_executor(
        function, whose, executor.wrappers, executor.idx + 1
    ).execute
    return run
