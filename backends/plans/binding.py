"""Which calls of a host's block a region serves, and which of their arguments it takes.

A form says what becomes of each argument (`Arguments`). A host of another version, or a pack, may
call a block with one argument more, one less, or in another order. The host's own code runs such a
call, unless it means the same: an argument that equals the host's default changes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from ..reasons import Reason, of

#: A block's forward, or what is in its place.
Forward = Callable[..., Any]

#: The step's options, which are taken first: all else may depend on them.
OPTIONS = "transformer_options"

_Values = tuple[Any, ...]
_EMPTY = inspect.Parameter.empty
#: Defaults that are compared by what they are, and not by which object.
_PLAIN = (bool, int, float, str, bytes, tuple, list, dict)
#: Ways to call a block that are remembered: by how many arguments, and by which names.
_MOST = 64


class Taken(NamedTuple):
    """An argument that a region is computed from.

    Attributes:
        default: used if the call has none; otherwise the host's own default.
        missing: why the host makes a call with None for it.
        is_left_out: whether None is not even an input.
    """

    default: Any = _EMPTY
    missing: Reason | None = None
    is_left_out: bool = False


#: What becomes of an argument: it is taken; it is refused for a reason, unless it is None; or
#: (None) it does not matter.
Use = Taken | Reason | None

TAKEN = Taken()
#: Taken, or None where a call has none.
OR_NONE = Taken(None)
#: An input where a call has it.
OPTIONAL = Taken(None, is_left_out=True)


def needed(missing: Reason) -> Taken:
    """Take an argument; the host makes a call without it, or with None, for this reason."""
    return Taken(None, missing)


class Beside:
    """Returned by what computes a block in place of a result: the host makes the call then.

    Attributes:
        parted: turns a block's result into the tensors that a region would return; None if it
            differs from what was learned.
    """

    parted: Callable[[Any], list[Any] | None]

    def made(self, own: Forward, args: _Values, kwargs: dict[str, Any]) -> Any:
        """Make the call, by the host's forward, and return its result."""
        raise NotImplementedError


class Arguments:
    """What becomes of a block's arguments, in the host's order."""

    def __init__(self, *first: str, **uses: Use) -> None:
        """Say what becomes of each.

        Args:
            *first: those that are taken by position, whatever the host's names.
            **uses: the others, by the host's names.
        """
        self.first = first
        self.named = uses
        self.uses: dict[str, Use] = {**dict.fromkeys(first, TAKEN), **uses}


class _CallForm(NamedTuple):
    """One way to call a block: so many arguments by position, and these by name.

    A call is one row of values, those by position first; numbers are indices into it.
    """

    #: Values behind those that come: what the call leaves to defaults.
    defaults: _Values
    #: Makes what is taken of the row; None where the host's own raises.
    pick: Callable[[_Values], _Values] | None
    #: Those that must be None, each with the reason.
    refused: tuple[tuple[int, Reason], ...] = ()
    #: Those that must not be.
    required: tuple[tuple[int, Reason], ...] = ()
    #: Those that we do not know: place, name, and what the host takes anyway.
    unknown: tuple[tuple[int, str, Any], ...] = ()
    #: Of what is taken, whether None is left out; empty where nothing is.
    optional: tuple[bool, ...] = ()
    #: Why every such call is the host's.
    reason: Reason | None = None
    #: Whether what comes by position is just what is taken.
    is_plain: bool = False
    #: Whether `why_not` has anything to look at.
    is_unusual: bool = False

    def why_not(self, values: _Values) -> Reason | None:
        """Why the host makes an unusual call, or None."""
        others = [name for i, name, idle in self.unknown if not _is_idle(values[i], idle)]
        if others:
            names = ", ".join(sorted(others))
            return of("unknown_arguments", names=names)
        return next((why for i, why in self.required if values[i] is None), self.reason)

    def present(self, taken: _Values) -> _Values:
        """What is taken, without what is left out."""
        pairs = zip(taken, self.optional, strict=True)
        return tuple(value for value, may_miss in pairs if value is not None or not may_miss)


def bound(
    arguments: Arguments, serve: Forward, own: partial[Any], decline: Callable[[Reason], Any]
) -> Forward:
    """Make the function that takes every call of a block.

    Args:
        serve: computes the block from what is taken, in order; returns None where the host must, or
            a `Beside`.
        own: the forward of the host's class, bound to the block.
        decline: notes why the host makes a call.
    """
    binding = _binding(own, arguments)
    ways = binding.ways

    def forward(*args: Any, **kwargs: Any) -> Any:
        way = ways.get((len(args), *kwargs) if kwargs else len(args))
        if way is None:
            way = binding.way(len(args), *kwargs)
        if way.is_plain:
            result = serve(*args)
            if result is None:
                return own(*args)
            return result.made(own, args, {}) if isinstance(result, Beside) else result
        values = (*args, *kwargs.values(), *way.defaults)
        reason = way.why_not(values) if way.is_unusual else None
        for i, why in way.refused:
            if values[i] is not None:
                reason = why
                break
        if reason is not None:
            decline(reason)
        elif way.pick is not None:
            taken = way.pick(values)
            result = serve(*(way.present(taken) if way.optional else taken))
            if result is not None:
                return result.made(own, args, kwargs) if isinstance(result, Beside) else result
        return own(*args, **kwargs)

    return forward


class _Binding:
    """How a host forward's arguments map to a form's."""

    def __init__(self, hosts: inspect.Signature, arguments: Arguments) -> None:
        self.hosts = hosts
        self._arguments = arguments
        #: The ways that were met, by how many arguments come by position, and the others' names.
        self.ways: dict[Any, _CallForm] = {}

    def way(self, count: int, *names: str) -> _CallForm:
        """Work out a way to call the block, once."""
        key = (count, *names) if names else count
        if len(self.ways) >= _MOST:
            self.ways.clear()
        try:
            places = self.hosts.bind(*range(count), **{n: count + i for i, n in enumerate(names)})
        except TypeError:
            way = _CallForm((), None)
        else:
            way = self._made(count, count + len(names), *self._known(places.arguments))
        self.ways[key] = way
        return way

    def _known(self, given: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, tuple[int, Any]]]:
        """The positions of our arguments in a call, by our names; and the others, by the host's,
        with their defaults.
        """
        arguments, order = self._arguments, list(self._arguments.uses)
        ours = {name: name for name in arguments.named}
        ours.update(zip(_positional(self.hosts), arguments.first, strict=False))
        known: dict[str, int] = {}
        others: dict[str, tuple[int, Any]] = {}
        for name, place in given.items():
            parameter = self.hosts.parameters[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                behind = order[len(_positional(self.hosts)) :]
                known.update(zip(behind, place, strict=False))
                if len(place) > len(behind):
                    others[f"*{name}"] = place[-1], _EMPTY
                continue
            open_ended = parameter.kind is parameter.VAR_KEYWORD
            for each, at in place.items() if open_ended else ((name, place),):
                if each in ours:
                    known[ours[each]] = at
                else:
                    others[each] = at, _EMPTY if open_ended else parameter.default
        return known, others

    def _made(
        self,
        by_position: int,
        count: int,
        known: dict[str, int],
        others: dict[str, tuple[int, Any]],
    ) -> _CallForm:
        defaults: list[Any] = []
        taken: list[tuple[int, bool]] = []
        refused, required = [], []
        unknown = [(at, name, idle) for name, (at, idle) in others.items()]
        reason = None
        for name, use in sorted(self._arguments.uses.items(), key=lambda each: each[0] != OPTIONS):
            if use is None:
                continue
            if not isinstance(use, Taken):
                refused += [(known[name], use)] if name in known else []
                continue
            at = known.get(name)
            if at is None:
                if use.is_left_out:
                    continue
                at, value = count + len(defaults), self._default(name, use)
                defaults.append(value)
                unknown += [(at, name, None)] if value is _EMPTY else []
                reason = reason or use.missing
            elif use.missing is not None:
                required.append((at, use.missing))
            taken.append((at, use.is_left_out))
        optional = tuple(may_miss for _, may_miss in taken)
        picked = [at for at, _ in taken]
        way = _CallForm(
            tuple(defaults),
            _picker(picked),
            tuple(refused),
            tuple(required),
            tuple(unknown),
            optional if any(optional) else (),
            reason,
            is_unusual=bool(required or unknown or reason),
        )
        is_whole = by_position == count and picked == list(range(count))
        has_more = way.defaults or way.refused or way.optional or way.is_unusual
        return way._replace(is_plain=is_whole and not has_more)

    def _default(self, name: str, use: Taken) -> Any:
        if use.default is not _EMPTY or name not in self.hosts.parameters:
            return use.default
        return self.hosts.parameters[name].default


def _picker(places: list[int]) -> Callable[[_Values], _Values]:
    """A function that takes these from a row, as a tuple."""
    if places == list(range(places[0], places[-1] + 1)):
        return itemgetter(slice(places[0], places[-1] + 1))
    return itemgetter(*places)


def _is_idle(value: Any, default: Any) -> bool:
    """Tell whether an argument that we do not know has the host's default value."""
    if value is default:
        return True
    return type(value) is type(default) and isinstance(value, _PLAIN) and bool(value == default)


def _positional(signature: inspect.Signature) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, each in signature.parameters.items() if each.kind in kinds]


#: By the function of the host's class and what becomes of its arguments: a model has many blocks of
#: a class.
_BINDINGS: dict[tuple[Any, Arguments], _Binding] = {}


def _binding(own: partial[Any], arguments: Arguments) -> _Binding:
    key = own.func, arguments
    hosts = _signature(own)
    if key not in _BINDINGS or _BINDINGS[key].hosts != hosts:
        _BINDINGS[key] = _Binding(hosts, arguments)
    return _BINDINGS[key]


def _signature(own: partial[Any]) -> inspect.Signature:
    """The host forward's signature, as its callers see it; any arguments, if it has none."""
    try:
        return inspect.signature(own, follow_wrapped=False)
    except (TypeError, ValueError):
        return inspect.signature(lambda *args, **kwargs: None)
