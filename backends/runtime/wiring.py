"""What other nodes did to a model's modules: replaced or hooked them, gave them another forward."""

from __future__ import annotations

import functools
from itertools import chain, repeat
from operator import attrgetter, contains, is_
from typing import Any

import torch

from ..families.plan import Dispatch, Passage, Plan
from ..host_api import attention
from ..host_api.layers import FORWARDS, own_forward
from ..kinds.packs import is_known, owner_of
from ..kinds.purity import objection
from ..kinds.sources import fingerprint, is_foreign
from ..kinds.watch import Watch

#: Plain attributes that nodes are known to set in place, for images that tile.
_SETTINGS = ("padding_mode", "padding", "stride", "dilation")
#: Of a layer for which a file, or a node, names an attention.
_OWN_ATTENTION = "a layer of it has an attention of its own"


class Wiring:
    """A module tree as it was, to see at little cost before each step whether it still is."""

    def __init__(self, root: torch.nn.Module) -> None:
        """Remember the tree; its modules are kept alive until this object goes."""
        modules = list(root.modules())
        self._parents = [module for module in modules if module._modules]
        self._tables = [module._modules for module in self._parents]
        self._names = list(chain.from_iterable(self._tables))
        self._children = list(chain.from_iterable(map(dict.values, self._tables)))
        self._modules = modules
        self._classes = list(map(type, modules))
        self._settings = _settings(modules)
        self._own = [m.__dict__ for m in modules]
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
        """Tell whether a module was replaced, added or taken away, or got another class."""
        return (
            list(chain.from_iterable(map(dict.values, self._tables))) != self._children
            or list(chain.from_iterable(self._tables)) != self._names
            # as `Sequential.pop` leaves it
            or not all(map(is_, map(attrgetter("_modules"), self._parents), self._tables))
            or list(map(type, self._modules)) != self._classes
        )

    def foreign(self) -> str | None:
        """Say what another node's code does within the tree, None where it is all the host's."""
        for name, _ in self._replaced_methods():
            return f"another node replaces {name} of this {type(self._root).__name__}"
        for module in self._modules:
            if isinstance(module, Passage):
                continue
            if (problem := _foreign_part(module)) is not None:
                return problem
            if not _has_known_code(type(module)):
                return f"another node replaces the code of {type(module).__name__}"
        return _OWN_ATTENTION if any(map(attention.names_its_own, self._attentions)) else None

    def marks(self) -> tuple[list[Any], list[int], list[bool]]:
        """Return which modules have hooks or a forward of their own, which methods the root has,
        and which layers an attention of their own, to compare with later.
        """
        forwards: list[Any] = [value for _, value in self._replaced_methods()]
        for name in FORWARDS:
            if any(map(contains, self._own, repeat(name))):
                forwards += [own[name] for own in self._own if name in own]
        hooked = [i for i, hooks in enumerate(self._hooks) if hooks] if any(self._hooks) else []
        return forwards, hooked, list(map(attention.names_its_own, self._attentions))

    def _replaced_methods(self) -> list[tuple[str, Any]]:
        """Functions in the root's instance in place of its class's: step caches put theirs there,
        which decide anew in each call.
        """
        root, methods = self._root, self._methods
        return [
            (name, value)
            for name, value in root.__dict__.items()
            if name in methods and callable(value) and not is_own_method(root, name, value)
        ]

    def settings_changed(self) -> bool:
        """Tell whether a plain attribute was set that the modules' code reads."""
        return self._settings != _settings(self._modules)


def _settings(modules: list[torch.nn.Module]) -> list[Any]:
    return [
        tuple(own.get(name) for name in _SETTINGS)
        for module in modules
        if "padding_mode" in (own := module.__dict__)
    ]


def patched_places(plan: Plan) -> list[tuple[str, str]]:
    """Return (place, reason) where another node hooked a module or gave it another forward, or a
    layer has an attention of its own that no graph calls.
    """
    found = []
    for dispatch in plan.dispatches:
        problem = _foreign_change(dispatch) or _own_attention(dispatch)
        if problem is not None:
            found += [(place.name, problem) for place in dispatch.regions]
    return found


@functools.cache
def _known_code(part: Any) -> bool:
    return is_known(getattr(part, "__module__", None))


def _has_known_code(cls: type) -> bool:
    """Tell whether a class is the host's or torch's, with all that it inherits."""
    return all(_known_code(part) for part in cls.__mro__ if part is not object) and all(
        _known_code(getattr(cls, name)) for name in FORWARDS if hasattr(cls, name)
    )


def replaced_function(root: torch.nn.Module, watch: Watch) -> str | None:
    """Say which function that a module runs through is not the host's, None where all are.

    Args:
        watch: gets every name that was followed, to notice later changes.
    """
    forward = own_forward(type(root))
    classes = {type(m) for m in root.modules() if not isinstance(m, Passage)}
    through: list[Any] = []
    found = fingerprint([forward], classes, watch, through)
    for function in through:  # `functools.wraps` gives another pack's the names of the host's
        problem = objection(function) if is_foreign(function) else None
        if problem is not None:
            return f"code of {owner_of(function)} takes part: it {problem}"
    for name in found:
        if not is_known(name.partition(":")[0]):
            return f"code of another package takes part ({name})"
    return None


def is_own_method(module: torch.nn.Module, name: str, value: Any) -> bool:
    """Tell whether an instance attribute is just the class's method, bound.

    The host leaves such a one behind when it takes back an object patch of a `forward`.
    """
    return getattr(value, "__self__", None) is module and getattr(
        value, "__func__", value
    ) is getattr(type(module), name, None)


def _foreign_change(dispatch: Dispatch) -> str | None:
    whole = all(place.form.children is None for place in dispatch.regions)
    names = {c for place in dispatch.regions for c in place.form.children or ()}
    module = dispatch.module
    inner = list(module.modules()) if whole else [module]
    for name in names:
        if (child := module._modules.get(name)) is not None:
            inner += list(child.modules())
    if dispatch.follower is not None:
        inner += list(dispatch.follower.module.modules())
    return next((problem for part in inner if (problem := _foreign_part(part))), None)


def _own_attention(dispatch: Dispatch) -> str | None:
    """Say that a layer attends in a way of its own, where graphs have the host's within them."""
    if attention.replaceable() is not None and all(
        place.form.live_attention for place in dispatch.regions
    ):
        return None
    parts = filter(attention.is_layer, dispatch.module.modules())
    return _OWN_ATTENTION if any(map(attention.names_its_own, parts)) else None


def _foreign_part(part: torch.nn.Module) -> str | None:
    for name in FORWARDS:
        if name in part.__dict__ and not is_own_method(part, name, part.__dict__[name]):
            return f"another node replaces the forward of a {type(part).__name__}"
    if part._forward_hooks or part._forward_pre_hooks:
        return f"another node hooks a {type(part).__name__}"
    return None
