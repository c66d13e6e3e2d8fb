"""What changes PyTorch's maths around a call without replacing the model's code: modes, hooks of
all modules, autocast, methods of tensors.

There a graph is not what the host would compute, and comparing them proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

import torch

from ..code.packs import OWN, origin, owner_of
from ..device.gpu import type_of
from ..reasons import Reason, of

#: What is called around each module's forward is in it.
_MODULE: Any = torch.nn.modules.module
#: Through these a module's forward is called.
_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward")
#: Modes of torch that say only where new tensors go.
_HARMLESS = frozenset((("torch.utils._device", "DeviceContext"),))
_AUTOCAST = of("autocast")
_HOOKED = of("hooks_all")

#: Methods of tensors and modules when the first model was described: all packs are imported then.
_baseline: dict[type, dict[str, Any]] = {}


def foreign(device: torch.device) -> Reason | None:
    """Return what changes this thread's maths on a device, or None. Cheap: each region asks."""
    if _MODULE._global_forward_hooks or _MODULE._global_forward_pre_hooks:
        return _HOOKED
    if torch.is_autocast_enabled(type_of(device)):
        return _AUTOCAST
    private: Any = torch._C
    if private._len_torch_function_stack() or private._len_torch_dispatch_stack():
        return next(filter(None, map(_of_mode, _modes())), None)
    return None


def replaced_methods() -> Reason | None:
    """Return which method of all tensors or modules changed since the first call of this."""
    if not _baseline:
        _baseline.update((cls, dict(vars(cls))) for cls in (torch.Tensor, torch.nn.Module))
    for cls, before in _baseline.items():
        now = vars(cls)
        if len(now) == len(before) and all(map(is_, now.values(), before.values())):
            continue
        for name in now.keys() | before.keys():
            if now.get(name) is not before.get(name) and _is_called(cls, name):
                return _replaced(cls, name, now.get(name))
    return None


def _is_called(cls: type, name: str) -> bool:
    """Whether the host's maths may use a method, and not only a pack."""
    if cls is torch.nn.Module:
        return name in _CALLS
    return name in _baseline[cls] or any(name in vars(base) for base in cls.__mro__[1:])


def _modes() -> list[Any]:
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    functions: Callable[[], list[Any]] = _get_current_function_mode_stack
    dispatched: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
    return [*functions(), *dispatched()]


def _of_mode(mode: Any) -> Reason | None:
    cls = type(mode)
    if (cls.__module__, cls.__name__) in _HARMLESS or cls.__module__.startswith((OWN, "comfy")):
        return None
    return of("sees_operations", name=cls.__name__, owner=owner_of(cls))


def _replaced(cls: type, name: str, value: Any) -> Reason:
    method = f"{cls.__name__}.{name}"
    if origin(value).partition(".")[0] in ("", "torch"):
        return of("replaces", name=method)
    return of("whose_replaces", owner=owner_of(value), name=method)
