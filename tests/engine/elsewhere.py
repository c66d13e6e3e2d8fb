"""A host that has one of the names that we ask for elsewhere, or calls it otherwise.

The host itself goes on as it is, as another release would with a name of its own; our package alone
sees the change, told by whose code asks.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from typing import Any

import pytest
import torch

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


# --- one more argument ----------------------------------------------------------------------------

#: What a block of a newer host takes besides, and what it takes where its caller gives none.
ARGUMENT, DEFAULT, UNLIKE = "newer_hint", 1.0, 0.5
REASON = f"called with other arguments than Warmgraph knows: {ARGUMENT}"


@contextmanager
def one_more_argument(cls: type[torch.nn.Module], value: Any) -> Iterator[None]:
    """Have the host's blocks of a class take one optional argument more, which all of their callers
    give by name; it changes nothing in them.
    """
    theirs = inspect.getattr_static(cls, "forward")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "forward", _Newer(theirs), raising=False)
        patch.setattr(cls, "__call__", _Giving(cls, value), raising=False)
        yield


def check_one_more_argument(
    classes: set[type[torch.nn.Module]],
    compiled: Callable[[], Any],
    check: Callable[[Any], Any],
    report: Callable[[Any], dict[str, Any]],
) -> None:
    """On a host that gives its blocks an argument more, those of one class at a time are its own
    and named; all others, which it gives what they take anyway, are compiled.

    Args:
        classes: of a model's blocks.
        compiled: compiles it anew, on another host.
        check: makes calls of it beside the host's.
        report: of what is compiled.
    """
    for cls in sorted(classes, key=lambda each: each.__name__):
        with ExitStack() as changes:
            for each in classes:
                value = UNLIKE if each is cls else DEFAULT
                changes.enter_context(one_more_argument(each, value))
            model = compiled()
            check(model)
            found = report(model)
        assert {entry["reason"] for entry in found["eager"]} == {REASON}, (cls, found["eager"])
        regions, calls = found["regions"], found["calls"]
        assert regions["eager"] > 0 and (calls["compiled"] > 0) == (regions["compiled"] > 0)
        assert regions["compiled"] > 0 or len(classes) == 1


def block_classes(model: Any) -> set[type[torch.nn.Module]]:
    """The classes of what is compiled of a model, a VAE or a ControlNet."""
    return {type(dispatch.module) for dispatch in model.scope.plan.dispatches}


class _Newer:
    """A class's forward with one argument more; its code is known by that of the one before."""

    def __init__(self, theirs: Any) -> None:
        self.__func__ = theirs

        def newer(self: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop(ARGUMENT, None)
            return theirs(self, *args, **kwargs)

        home = {"__name__": theirs.__module__, "ARGUMENT": ARGUMENT}
        code, closure = newer.__code__, newer.__closure__
        self._newer = types.FunctionType(code, home, theirs.__name__, None, closure)
        self._newer.__module__ = theirs.__module__
        known = inspect.signature(theirs)
        argument = inspect.Parameter(ARGUMENT, inspect.Parameter.KEYWORD_ONLY, default=DEFAULT)
        parameters = list(known.parameters.values())
        at = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
        parameters.insert(at, argument)
        self._newer.__signature__ = known.replace(parameters=parameters)  # type: ignore[attr-defined]

    def __get__(self, thing: Any, owner: Any = None) -> Any:
        return self._newer if thing is None else types.MethodType(self._newer, thing)


class _Giving:
    """A module's `__call__` that gives the argument; a subclass's is what it was."""

    def __init__(self, cls: type[torch.nn.Module], value: Any) -> None:
        self._cls, self._value = cls, value

    def __get__(self, thing: Any, owner: Any = None) -> Any:
        call = partial(torch.nn.Module.__call__, thing)
        return partial(call, **{ARGUMENT: self._value}) if type(thing) is self._cls else call
