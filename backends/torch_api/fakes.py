"""Run code on torch's fakes of known sizes, and see what its operators do.

Sources: torch/_subclasses/fake_tensor.py and torch/utils/_python_dispatch.py of torch 2.10-2.15.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Attention's operators, some of which could drop elements at random.
_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention")
#: What torch says of a tensor that it would have to copy out of its own hands.
_NO_NUMPY = "numpy() is not supported for tensor subclasses"


def sized_fakes() -> Any:
    """Return a fresh FakeTensorMode with plain numbers as sizes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def errors_unsaid() -> Iterator[None]:
    """Keep torch from logging failures on fakes: the error is raised anyway."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def modules_stay() -> Iterator[None]:
    """Leave modules moved to where they are: torch would replace each fake, and cannot. Nothing is
    loaded into them: a model without data has no file.
    """
    module: Any = torch.nn.Module
    move, load = module._apply, module.load_state_dict

    def moved(self: torch.nn.Module, change: Callable[..., Any], recurse: bool = True) -> Any:
        for tensor in (*self.parameters(recurse), *self.buffers(recurse)):
            other = change(tensor)
            if (other.dtype, other.device) != (tensor.dtype, tensor.device):
                return move(self, change, recurse)
        return self

    def unloaded(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return torch.nn.modules.module._IncompatibleKeys([], [])

    module._apply, module.load_state_dict = moved, unloaded
    try:
        yield
    finally:
        module._apply, module.load_state_dict = move, load


def asks_for_values(error: BaseException) -> bool:
    """Tell whether code failed on fakes because it reads a tensor's values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    beside = sys.modules[FakeTensorMode.__module__]
    names = ("DataDependentOutputException", "DynamicOutputShapeException")
    kinds = tuple(getattr(beside, name) for name in names)
    return isinstance(error, kinds) or _NO_NUMPY in str(error)


def memory_of(tensor: torch.Tensor) -> int:
    """Return a value that is equal for living tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports each operator that is called."""

    def __init__(self, tell: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Set up.

        Args:
            tell: is passed the operator and its arguments, before its call.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        self._tell(func, args, named)
        return func(*args, **named)


def is_random(function: Any) -> bool:
    name = function._schema.name
    drawn = torch.Tag.nondeterministic_seeded in function.tags
    return drawn and not any(each in name for each in _ATTENTION)


def written_by(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Iterator[Any]:
    """Yield the tensors that an operator writes into."""
    for i, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else named.get(argument.name)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                yield each


def operator_text(function: Any) -> str:
    """Return an operator's name, "library::operator"."""
    return str(function._schema.name)
