"""A call's arguments as plain data: taken apart into a template and leaves, and put together.

Leaves are tensors and whole numbers, which may differ from call to call. A template consists of
lists only, so that its order survives JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from ..code.packs import is_known
from ..errors import LearnError
from ..plans.describe import import_named
from ..reasons import of

#: The step's options: what a block reads of them is learned apart (`options`).
OPTIONS = "transformer_options"

#: At the end of a tuple's template that is one of torch's.
_SIZE = "size"

Template = list[Any]
#: Takes a leaf and returns its number; None for what stays in the template.
Keep = Callable[[Any], int | None]


def take_apart(value: Any, leaves: list[Any], name: str = "", *, numbers: bool = True) -> Template:
    """Describe a value; its tensors and whole numbers go into `leaves`.

    Args:
        value: an argument, or a result.
        leaves: taken so far.
        name: of the argument.
        numbers: whether whole numbers do, too; else they stay in the template.

    Raises:
        LearnError: it cannot be written down.
    """

    def keep(leaf: Any) -> int | None:
        if not (numbers or isinstance(leaf, torch.Tensor)):
            return None
        leaves.append(leaf)
        return len(leaves) - 1

    return _apart(value, keep, name)


def plain(value: Any) -> Template:
    """Describe a value without leaves: its whole numbers stay in the template.

    Raises:
        LearnError: it cannot be written down.
    """
    return _apart(value, lambda leaf: None, "")


def _apart(value: Any, keep: Keep, name: str) -> Template:
    if name == OPTIONS and isinstance(value, dict):
        return ["options"]
    if isinstance(value, torch.nn.Parameter):  # code may ask for the argument's type
        raise LearnError(of("learned_takes", sort="Parameter"))
    if isinstance(value, torch.Tensor) or type(value) is int:
        number = keep(value)
        if number is not None:
            return ["leaf", number]
    if type(value) is float and not math.isfinite(value):
        raise LearnError(of("learned_takes", sort=f"number {value}"))
    if value is None or type(value) in (bool, int, float, str):
        return ["plain", value]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, Enum) and is_known(type(value).__module__):
        return ["choice", name_of(type(value)), value.name]
    if type(value) in (list, tuple, torch.Size):
        kind = "list" if type(value) is list else "tuple"
        size = [_SIZE] if type(value) is torch.Size else []
        return [kind, [_apart(each, keep, "") for each in value], *size]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return ["dict", [[key, _apart(each, keep, key)] for key, each in value.items()]]
    for how, names in (("fields", _fields(value)), ("attributes", attributes(value))):
        if names:
            parts = [[each, _apart(getattr(value, each), keep, each)] for each in names]
            return [how, name_of(type(value)), parts]
    raise LearnError(of("learned_takes", sort=type(value).__qualname__))


def kind_of(template: Template) -> type[list[Any]] | type[tuple[Any, ...]]:
    """Return the class of the list or tuple that a template stands for."""
    if template[0] == "list":
        return list
    return torch.Size if template[-1] == _SIZE else tuple


def is_same(one: Any, other: Any) -> bool:
    """Tell whether two plain values are identical, including their type and the sign of zero."""
    return one is other or (type(one) is type(other) and one == other and repr(one) == repr(other))


def put_together(template: Template, leaves: Sequence[Any], options: Any = None) -> Any:
    """Rebuild a value.

    Args:
        template: as `take_apart` gives it.
        leaves: what stands in for its leaves.
        options: what stands in for the step's options.
    """
    tag, content, parts = (*template, None, None)[:3]
    if tag == "options":
        return options
    if tag == "leaf":
        return leaves[content]
    if tag == "plain":
        return content
    if tag == "dtype":
        return getattr(torch, content)
    if tag in ("list", "tuple"):
        items = [put_together(each, leaves, options) for each in content]
        return items if tag == "list" else tuple(items)
    if tag == "dict":
        return {name: put_together(each, leaves, options) for name, each in content}
    if tag == "choice":
        return import_named(content)[parts]
    made = {name: put_together(each, leaves, options) for name, each in parts or ()}
    cls = import_named(content)
    if tag == "fields":
        return cls._make(made.values())
    value = cls.__new__(cls)
    for name, each in made.items():
        object.__setattr__(value, name, each)
    return value


def name_of(cls: type) -> str:
    """Return the name by which a class is imported, "module:Class"."""
    return f"{cls.__module__}:{cls.__qualname__}"


def classes_of(arguments: Sequence[Any]) -> list[type]:
    """Return the classes whose objects a call takes; all of them is in the key.

    Args:
        arguments: (name, template) of each.
    """
    found: list[type] = []
    pending = [template for _, template in arguments]
    while pending:
        tag, *content = pending.pop()
        if tag in ("list", "tuple"):
            pending += content[0]
        elif tag in ("dict", "fields", "attributes"):
            pending += [each for _, each in content[-1]]
        if tag in ("fields", "attributes", "choice"):
            found.append(import_named(content[0]))
    return found


def leaf_names(arguments: Sequence[Any]) -> dict[int, str]:
    """Return for each leaf of a call the name of the argument that it is in.

    Args:
        arguments: (name, template) of each.
    """
    found: dict[int, str] = {}

    def walk(template: Template, name: str) -> None:
        tag, *content = template
        if tag == "leaf":
            found[content[0]] = name
        elif tag in ("list", "tuple"):
            for each in content[0]:
                walk(each, name)
        elif tag in ("dict", "fields", "attributes"):
            for inner, each in content[-1]:
                walk(each, f"{name}.{inner}")

    for name, template in arguments:
        walk(template, name)
    return found


def _fields(value: Any) -> list[str]:
    """The fields of a named tuple without other attributes."""
    if isinstance(value, type) or not is_known(type(value).__module__):
        return []
    return [] if getattr(value, "__dict__", None) else list(getattr(value, "_fields", ()))


def attributes(value: Any) -> list[str]:
    """Return the attributes of a plain host object, by which it can be rebuilt."""
    cls = type(value)
    if not is_known(cls.__module__) or isinstance(value, (type, tuple, torch.nn.Module)):
        return []
    if callable(value) or len(cls.__mro__) != 2 or "<locals>" in cls.__qualname__:
        return []
    slots = cls.__dict__.get("__slots__")
    names = list(slots) if slots is not None else sorted(getattr(value, "__dict__", {}))
    return names if all(hasattr(value, name) for name in names) else []
