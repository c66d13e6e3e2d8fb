"""What other nodes did to a model's modules: replaced or hooked them, gave them another forward."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from ..code.packs import is_known, owner_of
from ..code.purity import objection
from ..code.sources import fingerprint, is_foreign, wrapped_functions
from ..code.watch import Watch
from ..host_api import attention
from ..host_api.layers import FORWARDS, own_forward
from ..operators.live_parts import LivePart, is_norm, is_product
from ..plans.plan import Dispatch, Passage, Place, Plan
from ..reasons import Reason, of
from .attributes import Attributes, is_own_method, own_methods

#: Of a layer for which a file, or a node, names an attention.
_OWN_ATTENTION = of("own_attention")
#: Of a part in whose place a call brings a function.
BROUGHT = of("brings_attention")


class Wiring:
    """A module tree as it was, to check cheaply before each step whether it is unchanged."""

    def __init__(self, root: torch.nn.Module) -> None:
        """Remember the tree; its modules live as long as this object."""
        modules = list(root.modules())
        self._parents = [module for module in modules if module._modules]
        self._tables = [module._modules for module in self._parents]
        self._names = list(chain.from_iterable(self._tables))
        self._children = list(chain.from_iterable(map(dict.values, self._tables)))
        self._modules = modules
        self._classes = list(map(type, modules))
        #: What instances have of their own.
        self.attributes = Attributes(modules)
        self._hooks: list[Any] = [
            h for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)
        ]
        #: Parts that may name an attention of their own.
        self._attentions = [module for module in modules if attention.is_layer(module)]
        self._root = root
        cls = type(root)
        methods = {name for name in dir(cls) if callable(getattr(cls, name, None))}
        self._methods = methods - set(FORWARDS)

    def changed(self) -> bool:
        """Tell whether a module was replaced, added or removed, or got another class."""
        return (
            list(chain.from_iterable(map(dict.values, self._tables))) != self._children
            or list(chain.from_iterable(self._tables)) != self._names
            # as `Sequential.pop` leaves it
            or not all(map(is_, map(attrgetter("_modules"), self._parents), self._tables))
            or list(map(type, self._modules)) != self._classes
        )

    @property
    def has_methods(self) -> bool:
        """Whether the root has functions in place of its class's, but for its forward."""
        return bool(self._replaced_methods())

    def foreign(self) -> Reason | None:
        """Say what another node's code does within the tree, None if all is the host's."""
        for name, _ in self._replaced_methods():
            return of("replaces_of_this", name=name, model=type(self._root).__name__)
        self.attributes.look()
        if any(self.attributes.methods) or any(self._hooks):
            for module in self._modules:
                problem = None if isinstance(module, Passage) else _foreign_part(module)
                if problem is not None:
                    return problem
        for module in self._modules:
            if not isinstance(module, Passage) and not _has_known_code(type(module)):
                return of("replaces_code", layer=type(module).__name__)
        return _OWN_ATTENTION if any(map(attention.names_its_own, self._attentions)) else None

    def marks(self) -> tuple[list[Any], list[int], list[int]]:
        """Return which modules have hooks or their own methods, and which layers their own
        attention, to compare with later.
        """
        self.attributes.look()
        methods: list[Any] = [*self._replaced_methods(), *self.attributes.methods]
        hooked = [i for i, hooks in enumerate(self._hooks) if hooks] if any(self._hooks) else []
        own = [i for i, part in enumerate(self._attentions) if attention.names_its_own(part)]
        return methods, hooked, own

    def _replaced_methods(self) -> list[tuple[str, Any]]:
        """Functions in the root's instance in place of its class's: step caches put theirs there,
        which decide in each call.
        """
        root, methods = self._root, self._methods
        return [
            (name, value)
            for name, value in root.__dict__.items()
            if name in methods and callable(value) and not is_own_method(root, name, value)
        ]


class ForeignCode(NamedTuple):
    """Others' code in parts of one place, which its graph calls when it runs.

    Attributes:
        words: what it is, by the paths of the parts.
        live: which parts the graph must call for it.
        code: names of the functions, to know whether they were compared with eager before.
    """

    words: dict[str, Reason]
    live: LivePart
    code: str

    @property
    def why(self) -> Reason:
        """One of its words."""
        return next(iter(self.words.values()))


def with_given(guests: ForeignCode | None, given: Mapping[str, Any]) -> ForeignCode:
    """Add to others' code in a place what one of its calls brings, by the paths of the parts."""
    words, live, code = guests or ForeignCode({}, LivePart(False, ()), "")
    return ForeignCode(
        {**words, **dict.fromkeys(given, BROUGHT)},
        LivePart(live.products, tuple(sorted({*live.parts, *given}))),
        " ".join(sorted({*code.split(), *map(_name_of, given.values())})),
    )


class Others(NamedTuple):
    """What others did to the places of a plan: a reason for places left to the host, and the guests
    of the others.
    """

    places: dict[str, Reason]
    guests: dict[str, ForeignCode]


def others_in(plan: Plan) -> Others:
    """Find where another node hooked a module or gave it another forward, or a layer has its own
    attention that no graph calls.
    """
    places: dict[str, Reason] = {}
    guests: dict[str, ForeignCode] = {}
    for dispatch in plan.dispatches:
        found = {place.name: _guests_of(place) for place in dispatch.regions}
        problem = _foreign_change(dispatch) or _own_attention(dispatch)
        problem = problem or next((g for g in found.values() if isinstance(g, Reason)), None)
        if problem is not None:
            places.update(dict.fromkeys(found, problem))
        else:
            guests.update(
                (name, each) for name, each in found.items() if isinstance(each, ForeignCode)
            )
    return Others(places, guests)


def live_modules(plan: Plan) -> set[torch.nn.Module]:
    """Return the modules of all parts that graphs call live because of others' code."""
    guests = others_in(plan).guests
    return {
        module
        for place in plan.places
        if place.name in guests
        for path in guests[place.name].words
        for module in place.module.get_submodule(path).modules()
    }


@functools.cache
def _known_code(part: Any) -> bool:
    return is_known(getattr(part, "__module__", None))


def _has_known_code(cls: type) -> bool:
    """Tell whether a class is the host's or torch's, with all that it inherits."""
    return all(_known_code(part) for part in cls.__mro__ if part is not object) and all(
        _known_code(getattr(cls, name)) for name in FORWARDS if hasattr(cls, name)
    )


def replaced_function(root: torch.nn.Module, watch: Watch) -> Reason | None:
    """Say which function that a module runs through is not the host's, None if all are.

    Args:
        watch: every name that was followed is added, to notice later changes.
    """
    forward = own_forward(type(root))
    classes = {type(m) for m in root.modules() if not isinstance(m, Passage)}
    through: list[Any] = []
    found = fingerprint([forward], classes, watch, through)
    for function in through:  # `functools.wraps` gives another pack's the names of the host's
        problem = objection(function) if is_foreign(function) else None
        if problem is not None:
            what = of("it_does", what=problem)
            return of("code_takes_part", owner=owner_of(function), what=what)
    for name in found:
        if not is_known(name.partition(":")[0]):
            return of("package_takes_part", name=name)
    return None


def _foreign_change(dispatch: Dispatch) -> Reason | None:
    """Say what others did to the dispatched module, to what follows it, or around a place within
    it. Hooks of the module itself run around any forward.
    """
    inner = []
    if dispatch.follower is not None:  # it recognises the module's result by identity
        inner = [dispatch.module, *dispatch.follower.module.modules()]
    if any(place.module is not dispatch.module for place in dispatch.regions):
        inner += dispatch.module.modules()
    problem = _own_method(dispatch.module)
    return problem or next((found for part in inner if (found := _foreign_part(part))), None)


def _guests_of(place: Place) -> ForeignCode | Reason | None:
    """Others' code in parts of a place, or why a graph cannot call it; None for nothing. What lies
    within a part of another's is called by that part.
    """
    words: dict[str, Reason] = {}
    code: set[str] = set()
    parts, products = [], False
    kept = place.form.children
    pending = [(n, m) for n, m in place.module._modules.items() if kept is None or n in kept]
    while pending:
        path, part = pending.pop()
        if part is None:
            continue
        problem = _foreign_part(part)
        if problem is None:
            pending += [(f"{path}.{name}", child) for name, child in part._modules.items()]
            continue
        if is_product(part):
            products = True
        elif is_norm(part) or path in place.form.parts:
            parts.append(path)
        else:
            return problem
        words[path] = problem
        code.update(map(_name_of, _foreign_code(part)))
    if not words:
        return None
    return ForeignCode(words, LivePart(products, tuple(sorted(parts))), " ".join(sorted(code)))


def _own_attention(dispatch: Dispatch) -> Reason | None:
    """Say that a layer has its own attention, where graphs contain the host's."""
    if attention.replaceable() is not None and all(
        place.form.live_attention for place in dispatch.regions
    ):
        return None
    parts = filter(attention.is_layer, dispatch.module.modules())
    return _OWN_ATTENTION if any(map(attention.names_its_own, parts)) else None


def _foreign_part(part: torch.nn.Module) -> Reason | None:
    problem = _own_method(part)
    if problem is None and (part._forward_hooks or part._forward_pre_hooks):
        return of("hooks_a", layer=type(part).__name__)
    return problem


def _own_method(part: torch.nn.Module) -> Reason | None:
    return next((method.words for method in own_methods(part)), None)


def _foreign_code(part: torch.nn.Module) -> Iterator[Any]:
    yield from (method.value for method in own_methods(part))
    yield from (*part._forward_hooks.values(), *part._forward_pre_hooks.values())


def _name_of(code: Any) -> str:
    """The name of a function or callable, with the functions that it wraps."""
    named = code if hasattr(code, "__qualname__") else getattr(code, "func", type(code))
    named = getattr(named, "__func__", named)
    inner = wrapped_functions(named) if isinstance(named, types.FunctionType) else []
    names = (getattr(each, "__qualname__", type(each).__name__) for each in (named, *inner))
    return f"{getattr(named, '__module__', '')}:{'>'.join(names)}"
