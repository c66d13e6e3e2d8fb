"""A host that has one of the names that we ask for elsewhere, or calls it otherwise.

The host itself goes on as it is, as another release would with a name of its own; our package alone
sees the change, told by whose code asks.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

from warmgraph_backends.host_api.needs import Need

PACKAGE = "warmgraph_backends"
GONE, CALLED = "gone", "called otherwise"


def changes(need: Need) -> list[str]:
    """Return in which ways another host may differ in a line of the table: its name is gone, takes
    other arguments, or one of the names in its code is another.
    """
    return [GONE, *([CALLED] if need.call is not None else []), *need.names]


@contextmanager
def elsewhere(need: Need, change: str) -> Iterator[None]:
    """Have our package see another host, as long as this lasts."""
    module_name, _, path = need.name.partition(":")
    module = sys.modules[module_name]
    *owners, name = path.split(".")
    owner = reduce(getattr, owners, module)
    if isinstance(owner, types.ModuleType):
        value = vars(owner)[name]
        view = _OfModule(name, _for_us(value, need, change))
        before = type(owner)
        owner.__class__ = type("module", (before,), {name: view})
        try:
            yield
        finally:
            owner.__class__ = before
    else:
        theirs = vars(owner)[name]
        setattr(owner, name, _OfClass(theirs, name, _for_us(theirs, need, change)))
        try:
            yield
        finally:
            setattr(owner, name, theirs)


_NOT_THERE = object()


def _for_us(theirs: Any, need: Need, change: str) -> Any:
    """What our package sees in place of something of the host."""
    if change == GONE:
        return _NOT_THERE
    if change == CALLED:
        if isinstance(theirs, type):
            return type(theirs.__name__, (theirs,), {"__init__": _made_otherwise})
        return _called_otherwise
    function = vars(theirs)["__init__"] if isinstance(theirs, type) else theirs
    function = getattr(function, "__func__", function)
    renamed = types.FunctionType(
        _renamed(function.__code__, change),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    renamed.__kwdefaults__ = function.__kwdefaults__
    renamed.__module__ = function.__module__
    if isinstance(theirs, type):
        return type(theirs.__name__, (theirs,), {"__init__": renamed})
    return renamed


def _called_otherwise(*, by_another_name: Any) -> Any:
    raise AssertionError("it is not to be called")


def _made_otherwise(self: Any, *, by_another_name: Any) -> None:
    raise AssertionError("it is not to be made")


def _renamed(code: types.CodeType, name: str) -> types.CodeType:
    """The same code with another name for an attribute, or for a text."""

    def other(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return _renamed(value, name)
        if isinstance(value, tuple):
            return tuple(other(item) for item in value)
        return f"other{name}" if type(value) is str and value == name else value

    return code.replace(co_names=other(code.co_names), co_consts=other(code.co_consts))


def _asked_by_us() -> bool:
    """Whether it is our package's code that asks for an attribute."""
    asking = sys._getframe(2).f_globals.get("__name__", "")
    return bool(asking.startswith(PACKAGE))


class _OfModule:
    """Stands for a name of a module, whose functions find it among their globals as before."""

    def __init__(self, name: str, ours: Any) -> None:
        self._name, self._ours = name, ours

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if not _asked_by_us():
            return vars(module)[self._name]
        if self._ours is _NOT_THERE:
            raise AttributeError(self._name)
        return self._ours

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self._name] = value


class _OfClass:
    """Stands for an attribute of a class."""

    def __init__(self, theirs: Any, name: str, ours: Any) -> None:
        self._theirs, self._name, self._ours = theirs, name, ours

    def __get__(self, thing: Any, owner: Any = None) -> Any:
        found = self._theirs
        if _asked_by_us():
            if self._ours is _NOT_THERE:
                raise AttributeError(self._name)
            found = self._ours
        bind = getattr(type(found), "__get__", None)
        return found if bind is None else bind(found, thing, owner)
