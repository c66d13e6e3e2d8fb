"""The repeated blocks of a model, and what in their code or settings prevents a graph."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch

from ..code.bytecode import codes
from ..code.declared import is_generated
from ..code.packs import foreign_class
from ..code.purity import code_objection, defaults, is_plain
from ..code.sources import attributes_read, fingerprint
from ..errors import DescriptionError
from ..host_api import attention, kitchen, layers
from ..plans.describe import describe_module
from ..reasons import Reason, of
from ..storing.canonical_json import canonical_json
from ..torch_api.dicts import version_of
from .values import is_same, name_of

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
_PLAIN = (bool, int, float, str, type(None))
_NOTED = frozenset((*layers.STATE, *layers.FORWARDS))
#: Host code that only fetches weights or computes: its globals do not concern a block.
FETCHING = (*layers.MANAGEMENT, kitchen.PACKAGE, "comfy.ops")
#: What comes and goes on any layer that has weights, as these are loaded and a graph is placed.
_COMING = (*layers.FORWARDS, *layers.COMING)
#: What is compared by what it holds, and of attributes that begin with "_" what is at all.
_HOLDERS = (list, dict, set)
_COMPARED = (*_PLAIN, *_HOLDERS, tuple, types.FunctionType)
_OF_MODULES = frozenset(torch.nn.Module().__dict__) - {"training"}
_UNCOMPARED = _OF_MODULES.union(layers.STATE, _COMING, ("weight", "bias"))
#: What the host's code may do that a pack's may not: attributes are described, whoever asks.
_DESCRIBED = ("getattr", "hasattr")


def blocks_of(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the repeated blocks of a model by name: the outermost modules of whose class one list
    of the model has two or more.
    """
    found: dict[str, torch.nn.Module] = {}

    def search(module: torch.nn.Module, path: str) -> None:
        children = {name: each for name, each in module._modules.items() if each is not None}
        counts = Counter(map(type, children.values()))
        for name, child in children.items():
            below = f"{path}.{name}".lstrip(".")
            if isinstance(module, _CONTAINERS) and counts[type(child)] > 1 and _is_block(child):
                found[below] = child
            else:
                search(child, below)

    search(root, "")
    return found


def _is_block(module: torch.nn.Module) -> bool:
    return (
        not type(module).__module__.startswith("torch.")
        and not layers.is_operator(module)
        and sum(1 for _ in module.parameters()) > 3
        and any(child is not None for child in module._modules.values())
    )


def why_not(block: torch.nn.Module) -> Reason | None:
    """Say why no graph can replace a block, by its classes and their code; None if one may."""
    classes = sorted({type(part) for part in block.modules()}, key=name_of)
    for cls in classes:
        if "<locals>" in cls.__qualname__:
            return of("class_at_run_time", name=name_of(cls))
        if (owner := foreign_class(cls)) is not None:
            return owner
    return _objection(tuple(classes), tuple(kept_functions(block)))


def kept_functions(block: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return the functions that a block's layers have as attributes, which are described."""
    kept = [each for part in block.modules() for each in vars(part).values()]
    return [each for each in kept if isinstance(each, types.FunctionType)]


@lru_cache(maxsize=256)
def _objection(classes: tuple[type, ...], kept: tuple[Callable[..., Any], ...]) -> Reason | None:
    """Why the code of these classes may compute something else the next time."""
    through: list[Callable[..., Any]] = []
    fingerprint(kept, classes, through=through, live=attention.replaceable())
    for function in through:
        if str(function.__module__).startswith(FETCHING) or is_generated(function):
            continue
        problem = _problem(function)
        if problem is not None:
            return of("learned_code", name=function.__qualname__, why=problem)
    return None


def _problem(function: Any) -> Reason | None:
    if not all(is_plain(each) or each == {} for each in defaults(function)):
        return of("default_may_change")  # a block does not read `transformer_options={}`
    problem = code_objection(function)
    if problem is None:
        return None
    if problem.key == "calls" and problem.values["name"] in _DESCRIBED:
        return None
    return problem


class LayerAttributes:
    """The attributes of a block's layers now, except the host's notes."""

    def __init__(self, block: torch.nn.Module) -> None:
        """Look at a block."""
        self._block = block
        self._parts = [(part, part.__dict__, attributes_of(part)) for part in block.modules()]
        self._held = self._holding()

    def have_changed(self) -> bool:
        """Tell whether any attribute has changed, is gone or new, or is of another layer."""
        if self._holding() != self._held:
            return True
        none: tuple[Any, ...] = (None, {}, {})
        for (part, attributes, before), now in zip_longest(
            self._parts, self._block.modules(), fillvalue=none
        ):
            if part is not now:
                return True
            known = 0
            for name, value in attributes.items():
                if name in before:
                    known += 1
                    if not _is_same(before[name], value):
                        return True
                elif name[0] != "_" and name not in _NOTED:
                    return True
            if known != len(before):
                return True
        return False

    def _holding(self) -> list[Any]:
        """The contents of containers."""
        return [
            frozen(value)
            for _, attributes, before in self._parts
            for name, value in attributes.items()
            if name in before and _holds(value)
        ]


def _is_same(before: Any, now: Any) -> bool:
    return now is before or (type(before) in _PLAIN and is_same(before, now))


def attributes_of(part: torch.nn.Module) -> dict[str, Any]:
    """Return a layer's attributes, except the host's notes."""
    return {
        name: value
        for name, value in part.__dict__.items()
        if name not in _NOTED and name[0] != "_"
    }


class ReadAttributes:
    """The attributes that the code of a block's layers may read, as they are now."""

    def __init__(self, block: torch.nn.Module, names: Iterable[str] = ()) -> None:
        """Look at a block.

        Args:
            names: of attributes that are read besides those that code names.
        """
        wanted = all_read(block).union(names).difference(_UNCOMPARED)
        #: Of each layer all of its attributes, how many there are, and those that are read. What
        #: has come since may be asked for by its name, too.
        self._parts = []
        #: Those of them that are containers, with their contents.
        self._held = []
        for part in block.modules():
            attributes = part.__dict__
            read = [
                (name, value)
                for name, value in attributes.items()
                if name in wanted and (name[0] != "_" or isinstance(value, _COMPARED))
            ]
            self._held += [(attributes, n, frozen(value)) for n, value in read if _holds(value)]
            plain = [(name, value) for name, value in read if not _holds(value)]
            count = None if layers.is_operator(part) else _count(attributes)
            self._parts.append((attributes, count, plain))
        #: The attributes of the layers within the block; whoever is called sets the block's own.
        self._within = [attributes for attributes, *_ in self._parts[1:]]
        self._versions: list[Any] = [None] * len(self._within)

    def have_changed(self) -> bool:
        """Tell whether any of them has changed, is gone or new; called at each call."""
        if self._differ(*self._parts[0]):
            return True
        now = list(map(version_of, self._within))
        if now != self._versions:
            pairs = zip(self._parts[1:], now, self._versions, strict=True)
            if any(new != old and self._differ(*part) for part, new, old in pairs):
                return True
            self._versions = now
        return any(frozen(each.get(name, self)) != held for each, name, held in self._held)

    def _differ(
        self, attributes: dict[str, Any], count: int | None, read: Sequence[tuple[str, Any]]
    ) -> bool:
        """Tell whether attributes of one layer have changed, apart from containers."""
        for name, before in read:
            now = attributes.get(name, self)
            if now is not before and not _is_same(before, now):
                return True
        return count is not None and _count(attributes) != count


def _holds(value: Any) -> bool:
    """Tell whether something may change its contents: containers, and tuples of such."""
    return isinstance(value, _HOLDERS) or (isinstance(value, tuple) and any(map(_holds, value)))


def frozen(value: Any) -> Any:
    """Return a value that is equal for containers of equal contents, at any depth."""
    if isinstance(value, dict):
        return type(value), [(name, frozen(each)) for name, each in value.items()]
    if isinstance(value, (*_HOLDERS, tuple)):
        return type(value), [frozen(each) for each in value]
    return (type(value), repr(value)) if type(value) in _PLAIN else (type(value), id(value))


def _count(attributes: dict[str, Any]) -> int:
    count = len(attributes)
    for name in _COMING:
        if name in attributes:
            count -= 1
    return count


def all_read(block: torch.nn.Module) -> frozenset[str]:
    """Return the names of attributes that any code of a block's layers may read, of itself or of
    one another, also by a computed name.
    """
    classes: set[Any] = {type(part) for part in block.modules()}
    return frozenset().union(*(attributes_read(cls) | _texts(cls) for cls in classes))


@lru_cache(maxsize=1024)
def _texts(cls: type) -> frozenset[str]:
    """The texts in methods that read attributes by name."""
    found: set[str] = set()
    for base in cls.__mro__:
        for function in vars(base).values():
            code = getattr(getattr(function, "__func__", function), "__code__", None)
            for inner in codes(code) if code is not None else ():
                if {"getattr", "hasattr"} & set(inner.co_names):
                    found.update(each for each in inner.co_consts if isinstance(each, str))
    return frozenset(found)


def mark(block: torch.nn.Module) -> str:
    """Return a value that is equal for blocks that compute the same."""
    wanted = all_read(block)
    try:
        return canonical_json(describe_module(block, reads=lambda _: wanted, dtype=_as_it_is))
    except DescriptionError:
        return f"{id(block)}"


def _as_it_is(_module: torch.nn.Module, _name: str, tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype
