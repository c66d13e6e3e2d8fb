"""What names led to when a region was described, and whether they still lead there.

A graph was traced through the functions that were bound then. Another node may replace them at any
time, on a class or in a module, for one run or for good.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

from ..reasons import Reason, of
from .packs import is_known, origin, owner_of

_ABSENT = object()
#: What a function does, but for what it names.
_body = attrgetter("__code__", "__defaults__", "__kwdefaults__")

#: A class, or the namespace of a module.
Owner = type | dict[str, Any]


class Change(NamedTuple):
    """A name that leads elsewhere now: its name for people, and what is there."""

    name: str
    value: Any

    @property
    def words(self) -> Reason:
        """What another node did, for a report."""
        home = origin(self.value) or getattr(self.value, "__module__", None)
        known = not callable(self.value) or is_known(home)
        if known:
            return of("replaces", name=self.name)
        return of("whose_replaces", owner=owner_of(self.value), name=self.name)


class Watch:
    """Names of classes and in modules' namespaces, with the objects they led to."""

    def __init__(self) -> None:
        #: By owner and name; an owner is kept, so that its id stays its own.
        self._seen: dict[tuple[int, str], tuple[Owner, Any]] = {}
        #: By owner: its `get`, the names, the objects; made when first asked for.
        self._groups: list[tuple[Callable[..., Any], list[str], list[Any]]] | None = None
        self._bodies: dict[Any, Any] = {}

    def add_bodies(self, functions: Collection[Callable[..., Any]]) -> None:
        """Remember functions' code and defaults, which may be exchanged in place."""
        self._bodies.update(zip(functions, map(_body, functions), strict=True))

    def knows(self, owner: Owner, name: str) -> bool:
        """Tell whether a change of a name, of a class or a module, would be noticed."""
        if isinstance(owner, dict):
            return (id(owner), name) in self._seen
        owner = next((each for each in owner.__mro__ if name in vars(each)), owner)
        return (id(owner), name) in self._seen

    def add(self, owner: Owner, name: str) -> None:
        """Remember what an owner itself has under a name, at its first use; also if nothing."""
        key = id(owner), name
        if key not in self._seen:
            self._seen[key] = (owner, namespace(owner).get(name, _ABSENT))
            self._groups = None

    def add_attribute(self, cls: type, name: str) -> None:
        """Remember what a name leads to on a class, including what it inherits."""
        for owner in cls.__mro__:
            self.add(owner, name)
            if name in vars(owner):
                return

    def include(self, other: Watch) -> None:
        """Remember what another watch remembers."""
        self._seen.update(other._seen)
        self._bodies.update(other._bodies)
        self._groups = None

    def changed(self) -> bool:
        """Tell whether any name leads elsewhere now; cheap enough for each step."""
        if self._groups is None:
            self._groups = self._grouped()
        return not all(
            all(map(is_, map(get, names, repeat(_ABSENT)), values))
            for get, names, values in self._groups
        ) or any(self._other_bodies())

    def _other_bodies(self) -> Iterator[Any]:
        bodies = self._bodies
        for function, now, before in zip(bodies, map(_body, bodies), bodies.values(), strict=True):
            if now is not before and not all(map(is_, now, before)):
                yield function

    def changes(self) -> list[Change]:
        """Return the names that lead elsewhere now."""
        found = []
        for (_, name), (owner, value) in self._seen.items():
            now = namespace(owner).get(name, _ABSENT)
            if now is not value:
                found.append(Change(f"{_name_of(owner)}.{name}", None if now is _ABSENT else now))
        return found + [Change(each.__qualname__, each) for each in self._other_bodies()]

    def problem(self) -> Reason | None:
        """Say what another node replaced, None if nothing changed."""
        changes = self.changes() if self.changed() else []
        return changes[0].words if changes else None

    def _grouped(self) -> list[tuple[Callable[..., Any], list[str], list[Any]]]:
        groups: dict[int, tuple[Callable[..., Any], list[str], list[Any]]] = {}
        for (identifier, name), (owner, value) in self._seen.items():
            get = namespace(owner).get
            _, names, values = groups.setdefault(identifier, (get, [], []))
            names.append(name)
            values.append(value)
        return list(groups.values())


def namespace(owner: Owner) -> Mapping[str, Any]:
    """Return what an owner itself has, by name; live."""
    return vars(owner) if isinstance(owner, type) else owner


def _name_of(owner: Owner) -> str:
    """The name for people of a class, or of a module by its namespace."""
    if isinstance(owner, type):
        return owner.__name__
    return str(owner.get("__name__", "")).rpartition(".")[2]
