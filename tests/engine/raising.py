"""Functions of ours that raise on purpose, one at a time."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from types import FunctionType
from typing import Any

import pytest

#: Ends of names that Python makes.
_GENERATED = ("__new__", "_make", "_replace", "_asdict", "__getnewargs__", "__repr__")
_SKIPPED = (*_GENERATED, "__eq__", "__hash__", "__setattr__", "__delattr__", "__post_init__")


class OnPurposeError(Exception):
    """Raised by a function of ours in a test."""


def functions(modules: Sequence[str]) -> Iterator[tuple[str, Any, str, Any]]:
    """(name, owner, attribute, replacement's wrapper) of every function of these modules of
    ours."""
    for module_name in modules:
        module = importlib.import_module(f"warmgraph_backends.{module_name}")
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if isinstance(value, FunctionType):
                yield name, module, name, value
            elif inspect.isclass(value) and not issubclass(value, Enum):
                for attribute, member in vars(value).items():
                    kind = type(member)
                    if kind in (FunctionType, property, classmethod, staticmethod):
                        yield f"{name}.{attribute}", value, attribute, member


def _raising(member: Any) -> Any:
    def raises(*_: Any, **__: Any) -> Any:
        raise OnPurposeError

    if isinstance(member, property):
        return property(raises)
    return classmethod(raises) if isinstance(member, classmethod) else raises


def names_of(modules: Sequence[str], but: Collection[str]) -> list[str]:
    """The names of those functions, each once, but those that Python makes, and `but`."""
    found = [name for name, *_ in functions(modules) if not name.endswith(_SKIPPED)]
    return [name for name in dict.fromkeys(found) if name not in but]


def make_raise(name: str, modules: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the functions of this name raise, by whatever name they were imported."""
    for found, owner, attribute, member in functions(modules):
        if found == name:
            monkeypatch.setattr(owner, attribute, _raising(member))
            for module in modules:
                other = importlib.import_module(f"warmgraph_backends.{module}")
                if vars(other).get(attribute) is member:
                    monkeypatch.setattr(other, attribute, _raising(member))
