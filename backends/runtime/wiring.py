"""What other nodes did to a model's modules: replaced or hooked them, gave them another forward."""

from __future__ import annotations

import functools
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from ..families.plan import Dispatch, Passage, Plan
from ..host_api import attention
from ..host_api.layers import FORWARDS, own_forward
from ..kinds.packs import is_known, owner_of
from ..kinds.purity import objection
from ..kinds.sources import fingerprint, is_foreign
from ..kinds.watch import Watch
from .attributes import Attributes, is_own_method, own_methods

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
        self.attributes.look()
        if any(self.attributes.methods) or any(self._hooks):
            for module in self._modules:
                problem = None if isinstance(module, Passage) else _foreign_part(module)
                if problem is not None:
                    return problem
        for module in self._modules:
            if not isinstance(module, Passage) and not _has_known_code(type(module)):
                return f"another node replaces the code of {type(module).__name__}"
        return _OWN_ATTENTION if any(map(attention.names_its_own, self._attentions)) else None

    def marks(self) -> tuple[list[Any], list[int], list[int]]:
        """Return which modules have hooks, which methods of their own, and which layers an
        attention of their own, to compare with later.
        """
        self.attributes.look()
        methods: list[Any] = [*self._replaced_methods(), *self.attributes.methods]
        hooked = [i for i, hooks in enumerate(self._hooks) if hooks] if any(self._hooks) else []
        own = [i for i, part in enumerate(self._attentions) if attention.names_its_own(part)]
        return methods, hooked, own

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
    for method in own_methods(part):
        return method.words
    if part._forward_hooks or part._forward_pre_hooks:
        return f"another node hooks a {type(part).__name__}"
    return None
