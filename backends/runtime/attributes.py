"""Plain attributes that modules' code reads, and methods that instances have of their own.

Nodes set both in place, so no name in the code changes.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable
from functools import cache
from operator import is_
from typing import Any, NamedTuple

import torch

from ..code.bytecode import codes
from ..code.sources import attributes_read
from ..host_api import attention
from ..host_api.layers import FORWARDS, STATE
from ..plans.plan import Passage
from ..reasons import Reason, of

#: torch calls a module's forward through these, which an instance may have as well.
_CALLS = frozenset(("_call_impl", "_wrapped_call_impl", "_compiled_call_impl", "_slow_forward"))
_OTHER = object()
_TORCH_STATE = frozenset(torch.nn.Module().__dict__)


class Method(NamedTuple):
    """A function that an instance has in place of its class's."""

    module: torch.nn.Module
    name: str
    value: Any

    @property
    def words(self) -> Reason:
        """What another node did, for a report."""
        label = type(self.module).__name__
        if self.name in FORWARDS:
            return of("replaces_forward", layer=label)
        return of("replaces_of_a", name=self.name, layer=label)


class Attributes:
    """The instance attributes of a module tree, as they were described."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        """Remember how things are now."""
        # By which attention a layer runs is asked when it does (`Wiring`); what lies in passages of
        # ours is set by us, in each step.
        self._modules = [
            module
            for module in modules
            if not (attention.is_layer(module) or isinstance(module, Passage))
        ]
        self._own = [module.__dict__ for module in self._modules]
        names: dict[type, frozenset[str]] = {}
        for cls in set(map(type, self._modules)):
            names[cls] = _read_by(cls)
        self._names = [names[type(module)] for module in self._modules]
        self._sizes: list[int] = []
        #: Methods that instances have of their own, when this was last looked at.
        self.methods: list[Method] = []
        #: What another node set since the description, by module, in words; when this was last
        #: looked at.
        self.set_since: list[tuple[torch.nn.Module, Reason]] = []
        self._described = self._scan()

    def look(self) -> None:
        """Find what was set or replaced since the description. Cheap enough for each step if
        nothing changed since the last time.
        """
        filled = any(_described(value) != before for value, before in self._lists)
        if self._has_others() or filled or not self._items.are_there():
            self._look_closely()

    def _has_others(self) -> bool:
        """Tell whether a name was added; the host's own come and go while it moves weights."""
        before, self._sizes = self._sizes, list(map(len, self._own))
        if self._sizes == before:
            return False
        rows = zip(self._sizes, before, self._own, self._names, self._seen, strict=True)
        return any(
            size != was and own.keys() & names != seen for size, was, own, names, seen in rows
        )

    def _look_closely(self) -> None:
        now = self._scan()
        self.set_since = []
        pairs = zip(self._modules, now, self._described, strict=True)
        for module, one, other in pairs if now != self._described else ():
            if one != other:
                name = min(name for name, _ in one.items() ^ other.items())
                reason = of("sets_of_a", name=name, layer=type(module).__name__)
                self.set_since.append((module, reason))

    def _scan(self) -> list[dict[str, Any]]:
        """The plain attributes of each module; notes what all look like, for `look`."""
        self._sizes = list(map(len, self._own))
        self._items = _Items()
        self._seen: list[set[str]] = []
        self._lists: list[tuple[list[Any], Any]] = []
        self.methods = []
        settings = []
        for module, own, names in zip(self._modules, self._own, self._names, strict=True):
            plain: dict[str, Any] = {}
            self._seen.append(own.keys() & names)
            for name in self._seen[-1]:
                value = own[name]
                if _is_method(type(module), name, value):
                    self._items.add(own, name)
                    if not is_own_method(module, name, value):
                        self.methods.append(Method(module, name, value))
                elif (described := _described(value)) is not _OTHER:
                    self._items.add(own, name)
                    plain[name] = described
                    if type(value) is list:
                        self._lists.append((value, described))
            settings.append(plain)
        return settings


class _Items:
    """Items of dicts, to check quickly whether they are unchanged."""

    def __init__(self) -> None:
        self._holders: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []

    def add(self, holder: dict[str, Any], name: str) -> None:
        self._holders.append(holder)
        self._names.append(name)
        self._values.append(holder[name])

    def are_there(self) -> bool:
        return all(map(is_, map(dict.get, self._holders, self._names), self._values))


def own_methods(module: torch.nn.Module) -> list[Method]:
    """Return the functions that an instance has in place of those of its class that are called."""
    own, cls = module.__dict__, type(module)
    return [
        Method(module, name, own[name])
        for name in sorted(own.keys() & _read_by(cls))
        if _is_method(cls, name, own[name]) and not is_own_method(module, name, own[name])
    ]


def is_own_method(module: torch.nn.Module, name: str, value: Any) -> bool:
    """Tell whether an instance attribute is just the class's method, bound.

    The host leaves one behind when it undoes an object patch of a `forward`.
    """
    return getattr(value, "__self__", None) is module and getattr(
        value, "__func__", value
    ) is getattr(type(module), name, None)


def _is_method(cls: type, name: str, value: Any) -> bool:
    return callable(value) and (name in _CALLS or callable(getattr(cls, name, None)))


def _described(value: Any) -> Any:
    """An attribute as a description keeps it; `_OTHER` for what it would refuse."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value  # 1, 1.0 and True are equal
    if isinstance(value, (list, tuple)):
        items = tuple(map(_described, value))
        return _OTHER if _OTHER in items else (type(value), items)
    return value if isinstance(value, types.FunctionType) else _OTHER


def _read_by(cls: type) -> frozenset[str]:
    """The attributes that a class's code reads and does not itself write while it runs."""
    return _of_others(cls, attributes_read(cls))


@cache
def _of_others(cls: type, read: frozenset[str]) -> frozenset[str]:
    return (read | _CALLS | frozenset(FORWARDS)) - _TORCH_STATE - STATE - _written_by(cls)


@cache
def _written_by(cls: type) -> frozenset[str]:
    written: set[str] = set()
    for base in cls.__mro__:
        for name, value in vars(base).items():
            function = getattr(value, "__func__", value)
            code = getattr(function, "__code__", None)
            if code is None or name == "__init__" or base.__module__.startswith("torch."):
                continue
            written |= {
                step.argval
                for inner in codes(code)
                for step in dis.get_instructions(inner)
                if step.opname == "STORE_ATTR"
            }
    return frozenset(written)
