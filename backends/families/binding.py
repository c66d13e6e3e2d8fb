"""Which calls of a block a forward of ours is for: those with the arguments that it knows.

A host of another version, or a pack, may call a block with one argument more, one less, or in
another order. Such a call is the host's own code's, with what its caller gave, unless it means the
same: what the host would take for it anyway says nothing new.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

#: A block's forward, or what is in its place.
Forward = Callable[..., Any]

#: What a forward of ours returns for the host's.
_HOSTS = object()

#: Defaults that are compared by what they are, and not by which object.
_PLAIN = (bool, int, float, str, bytes, tuple, list, dict)


class HostsTurn:
    """What a forward of ours calls in the host's place, to no effect: whoever called it makes the
    call anew, with the arguments that came.
    """

    def __init__(self, own: partial[Any]) -> None:
        #: The function of the host's class.
        self.func = own.func

    def __call__(self) -> Any:
        return _HOSTS


def bound(
    make: Callable[[HostsTurn], Forward], own: partial[Any], decline: Callable[[str], Any]
) -> Forward:
    """Make what takes every call of a block.

    Args:
        make: makes our forward from the host's turn. Of it the names and the order of arguments
            count; names of those that are positional only do not.
        own: the forward of the host's class, bound to the block.
        decline: notes why a call is the host's.
    """
    ours = make(HostsTurn(own))
    binding = _binding(own, ours)
    most, names, needed = binding.in_order, binding.names, binding.needed

    def forward(*args: Any, **kwargs: Any) -> Any:
        count = len(args)
        if count <= most and kwargs.keys() <= names and needed[count] <= kwargs.keys():
            result = ours(*args, **kwargs)
        else:
            result = binding.other(ours, decline, args, kwargs)
        return own(*args, **kwargs) if result is _HOSTS else result

    return forward


class _Binding:
    """What the arguments of a host's forward are to one of ours."""

    def __init__(self, hosts: inspect.Signature, ours: inspect.Signature) -> None:
        """Compare them once."""
        self._hosts = hosts
        theirs = hosts.parameters
        kinds = {parameter.kind for parameter in theirs.values()}
        #: Arguments by position, by the host's names and by ours.
        self._places, self._order = _positional(theirs), _positional(ours.parameters)
        self._unnamed = [n for n, p in ours.parameters.items() if p.kind is p.POSITIONAL_ONLY]
        #: How many arguments by position mean what they do in the host's.
        self.in_order = 0
        open_ended = inspect.Parameter.VAR_POSITIONAL in kinds
        for i, name in enumerate(self._order):
            there = self._places[i] if i < len(self._places) else None
            if not (open_ended if there is None else name in (there, *self._unnamed)):
                break
            self.in_order += 1
        by_name = [name for name in ours.parameters if name not in self._unnamed]
        any_name = inspect.Parameter.VAR_KEYWORD in kinds
        #: Arguments that may come by name.
        self.names = frozenset(name for name in by_name if name in theirs or any_name)
        #: Ours by the names that the host has for them.
        self._known = {name: name for name in self.names}
        self._known.update(zip(self._places, self._unnamed, strict=False))
        #: What the host takes for its other arguments where none is given.
        self._others = {n: p.default for n, p in theirs.items() if n not in self._known}
        required = [n for n, p in ours.parameters.items() if p.default is p.empty]
        #: By how many arguments come by position: those without which ours cannot be called.
        self.needed = [
            frozenset(name for name in required if name not in self._order[:count])
            for count in range(len(self._order) + 1)
        ]

    def other(
        self,
        ours: Forward,
        decline: Callable[[str], Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Make a call that is not plainly ours by our forward, where that means the same."""
        count, more = len(args), kwargs.keys() - self.names
        if (
            count <= self.in_order
            and self.needed[count] <= kwargs.keys()
            and all(self._is_idle(name, kwargs[name]) for name in more)
        ):
            return ours(*args, **{n: value for n, value in kwargs.items() if n not in more})
        try:
            given = self._hosts.bind(*args, **kwargs)
        except TypeError:  # which the host's own raises, too
            return _HOSTS
        given.apply_defaults()
        mine: dict[str, Any] = {}
        unknown: set[str] = set()
        for name, value in given.arguments.items():
            parameter = self._hosts.parameters[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                mine.update({key: value[key] for key in value.keys() & self.names})
                unknown |= value.keys() - self.names
            elif parameter.kind is parameter.VAR_POSITIONAL:
                places = self._order[len(self._places) :]
                mine.update(zip(places, value, strict=False))
                unknown |= {f"*{name}"} if len(value) > len(places) else set()
            elif name in self._known:
                mine[self._known[name]] = value
            elif not self._is_idle(name, value):
                unknown.add(name)
        unknown |= self.needed[0] - mine.keys()
        if unknown:
            names = ", ".join(sorted(unknown))
            decline(f"called with other arguments than Warmgraph knows: {names}")
            return _HOSTS
        unnamed = [mine.pop(name) for name in self._unnamed]
        return ours(*unnamed, **mine)

    def _is_idle(self, name: str, value: Any) -> bool:
        """Tell whether an argument that ours does not know is what the host takes anyway."""
        default = self._others.get(name, inspect.Parameter.empty)
        if value is default:
            return True
        return type(value) is type(default) and isinstance(value, _PLAIN) and bool(value == default)


def _positional(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in parameters.items() if parameter.kind in kinds]


#: By the function of the host's class and the code of ours: a model has many blocks of a class.
_BINDINGS: dict[tuple[Any, Any], _Binding] = {}


def _binding(own: partial[Any], ours: Forward) -> _Binding:
    key = own.func, getattr(ours, "__code__", ours)
    if key not in _BINDINGS:
        _BINDINGS[key] = _Binding(_signature(own), inspect.signature(ours))
    return _BINDINGS[key]


def _signature(own: partial[Any]) -> inspect.Signature:
    """Of the host's forward, as its callers see it; anything, where it does not say."""
    try:
        return inspect.signature(own, follow_wrapped=False)
    except (TypeError, ValueError):
        return inspect.signature(lambda *args, **kwargs: None)
