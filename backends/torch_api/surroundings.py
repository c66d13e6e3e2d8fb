"""What changes PyTorch's maths around a call with none of the model's code replaced: modes that see
each operation, hooks of all modules, autocast, methods of tensors.

In such surroundings a graph is not what the host's code would compute, nor is a comparison with it
worth anything.
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

#: What tensors and modules are called through, as it was when the first model was described: by
#: then all packs are imported.
_baseline: dict[type, dict[str, Any]] = {}


def foreign(device: torch.device) -> Reason | None:
    """Say what of somebody else's changes the maths of this thread on a device, None for nothing.

    Cheap enough for each region.
    """
    if _MODULE._global_forward_hooks or _MODULE._global_forward_pre_hooks:
        return _HOOKED
    if torch.is_autocast_enabled(type_of(device)):
        return _AUTOCAST
    private: Any = torch._C
    if private._len_torch_function_stack() or private._len_torch_dispatch_stack():
        return next(filter(None, map(_of_mode, _modes())), None)
    return None


def replaced_methods() -> Reason | None:
    """Say which method of all tensors or modules is another one than when this was first asked."""
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
    """Whether the host's maths may go through a method, and not only a pack's own."""
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
