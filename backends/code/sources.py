"""Which functions a region runs through, and hashes of them.

A graph that was traced through a function is wrong once the function changes, so its code is part
of the key. Code objects are hashed (byte code, names, constants), not text: comments and file paths
do not count. The walk is static and follows a function's names: globals, dotted names of modules,
closures.
"""

from __future__ import annotations

import hashlib
import re
import sys
import types
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache, lru_cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ..host_api.layers import MANAGEMENT, NOT_TRACED, STATE
from .bytecode import canonical_text, codes, global_chains, hash_code
from .declared import constructors
from .packs import OWN, origin
from .watch import Owner, Watch, namespace

_FOREIGN = frozenset(sys.stdlib_module_names) | frozenset(
    ("torch", "torchvision", "numpy", "einops", "logging", "typing_extensions")
)
#: Methods of torch's layers that other packs are known to replace.
_OF_TORCH = ("forward", "_conv_forward")
_LONGEST = 200  # characters of a plain value
_DEEPEST = 8  # nested wrappers; functions beyond that are hashed without their order


def fingerprint(
    functions: Iterable[Callable[..., Any]],
    classes: Iterable[type],
    watch: Watch | None = None,
    through: list[Callable[..., Any]] | None = None,
    live: Callable[..., Any] | None = None,
) -> dict[str, str]:
    """Hash every function that `functions` and the forwards of `classes` run through.

    Args:
        functions: a class among them stands for all its methods.
        watch: every name that was followed is added, to notice later changes.
        through: the functions themselves are added.
        live: a function that does not count: a graph calls it when it runs.

    Returns:
        {"module:qualname": 16 hex digits}, and {"module:NAME": text} for plain global values that
        such a function reads; sorted, the same in every process.
    """
    found: dict[str, str] = {}
    # A decorator's inner function may have the name of the function it wraps: both count.
    digests: dict[str, set[str]] = {}
    watch = watch or Watch()
    pending = list(functions)
    for cls in classes:
        pending += _methods(cls, watch, found)
        pending += _replaced_in_torch(cls, watch)
    seen: dict[int, Callable[..., Any]] = {}
    while pending:
        function = pending.pop()
        if isinstance(function, type):
            pending += _whole(function, watch, found)
            continue
        code = getattr(function, "__code__", None)
        if code is None or id(function) in seen or _is_outside(function):
            continue
        seen[id(function)] = function
        if function.__name__ in NOT_TRACED:
            continue
        digest, values, callees = _examine(function, watch, live)
        name = f"{_module_name(function)}:{function.__qualname__}"
        digests.setdefault(name, set()).add(digest)
        if is_foreign(function):
            order = hashlib.sha256(_layers(function).encode()).hexdigest()[:16]
            digests.setdefault(f"{name}.<around>", set()).add(order)
        found.update(values)
        pending += callees
        pending += _replaced_operators(function.__code__, watch)
    watch.add_bodies(seen.values())
    if through is not None:
        through += seen.values()
    found.update({name: "+".join(sorted(several)) for name, several in digests.items()})
    return dict(sorted(found.items()))


def attributes_read(cls: type) -> frozenset[str]:
    """Return every attribute name that the methods of a class (outside torch) read, and torch's own
    plain settings for its classes."""
    return _attributes_read(cls, *(vars(base).get("forward") for base in cls.__mro__))


@cache
def _attributes_read(cls: type, *forwards: Any) -> frozenset[str]:
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") and base is not torch.nn.Module:
            names.update(getattr(base, "__constants__", ()))
            names.update(("eps", "p", "inplace", "_reversed_padding_repeated_twice"))
        for function in vars(base).values():
            function = getattr(function, "__func__", function)
            code = getattr(function, "__code__", None)
            if code is not None and function.__name__ != "__init__":
                for around in _with_wrapped(function):
                    for inner in codes(around.__code__):
                        names.update(inner.co_names)
    return frozenset(names)


def _with_wrapped(function: Any) -> list[Any]:
    """A function and those that it wraps."""
    found, pending = [], [function]
    while pending:
        one = pending.pop()
        if one not in found:
            found.append(one)
            pending += wrapped_functions(one)
    return found


def _methods(cls: type, watch: Watch, values: dict[str, str]) -> list[Callable[..., Any]]:
    """The forward of a class and the methods that it reaches by name, including its parents' for
    `super()`; plain class attributes that they name go into `values`.
    """
    reached: list[Callable[..., Any]] = []
    named: set[str] = set()
    pending = ["forward"]
    while pending:
        name = pending.pop()
        if name in named or name in STATE or not hasattr(cls, name):
            continue
        named.add(name)
        for owner in cls.__mro__:
            watch.add(owner, name)
            if name not in vars(owner):
                continue
            value = vars(owner)[name]
            function = getattr(value, "fget", getattr(value, "__func__", value))
            code = getattr(function, "__code__", None)
            if is_outside(owner.__module__):
                if code is not None:
                    _watch_torch(function, watch)
                    pending += code.co_names
                break  # what it inherits is torch's own
            if name in NOT_TRACED:
                continue
            if code is not None and not _is_outside(function):
                reached.append(function)
                for inner in codes(code):
                    pending += inner.co_names
            elif code is None and not name.startswith("__") and (text := _value(value)) is not None:
                values[f"{owner.__module__}:{owner.__qualname__}.{name}"] = text
    return reached


def _whole(cls: type, watch: Watch, values: dict[str, str]) -> list[Callable[..., Any]]:
    """All functions of a class, also behind properties; its plain attributes go into `values`."""
    found: list[Callable[..., Any]] = []
    for owner in cls.__mro__:
        for name, value in () if is_outside(owner.__module__) else vars(owner).items():
            function = getattr(value, "fget", getattr(value, "__func__", value))
            if isinstance(function, types.FunctionType):
                found.append(function)
            elif name[:2] == "__":
                continue
            elif (text := _value(value)) is not None:
                values[f"{_known_as(owner.__module__)}:{owner.__qualname__}.{name}"] = text
            watch.add(owner, name)
    return found


def _watch_torch(function: Any, watch: Watch) -> None:
    """Watch what a method of torch calls: `torch.nn.functional`'s functions, for the most part."""
    for chain in global_chains(function.__code__):
        _resolve(function.__globals__, chain, {}, [], watch)


def _examine(
    function: Any, watch: Watch, live: Callable[..., Any] | None
) -> tuple[str, dict[str, str], list[Callable[..., Any]]]:
    values: dict[str, str] = {}
    callees: list[Callable[..., Any]] = []
    module = _module_name(function)
    follow = not module.startswith(MANAGEMENT)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        if isinstance(content, types.FunctionType):
            callees.append(content)
        elif (text := _value(content)) is not None:
            values[f"{module}:{function.__qualname__}.<closure>.{name}"] = text
    if follow:
        for code in codes(function.__code__):
            for chain in global_chains(code):
                _resolve(function.__globals__, chain, values, callees, watch, live)
    keyword_only = sorted((function.__kwdefaults__ or {}).items())
    defaults = canonical_text(function.__defaults__ or ()) + canonical_text(keyword_only)
    digest = hash_code(function.__code__) + defaults
    return hashlib.sha256(digest.encode()).hexdigest()[:16], values, callees


def _resolve(
    scope: dict[str, Any],
    chain: list[str],
    values: dict[str, str],
    callees: list[Callable[..., Any]],
    watch: Watch,
    live: Callable[..., Any] | None = None,
) -> None:
    if chain[0] not in scope:
        return
    value, where = scope[chain[0]], f"{_known_as(str(scope.get('__name__')))}:{chain[0]}"
    name, holder = chain[0], scope  # type: str, Owner
    for part in chain[1:]:
        if not isinstance(value, (types.ModuleType, type)) or not hasattr(value, part):
            break
        _watch_name(holder, name, watch)
        if isinstance(value, type):
            name, holder = part, value
            where = f"{_known_as(value.__module__)}:{value.__qualname__}.{part}"
        else:
            name, holder = part, vars(value)
            where = f"{_known_as(value.__name__)}:{part}"
        value = getattr(value, part)
    owner, function = where.partition(":")[0], getattr(value, "__func__", value)
    if callable(value) and not isinstance(value, type):
        _watch_name(holder, name, watch)
    if live is not None and function is live:
        values[where] = "live"
    elif isinstance(function, types.FunctionType):
        if function.__name__ not in NOT_TRACED and not _is_outside(function):
            callees.append(function)
    elif isinstance(value, type) and value.__module__.startswith(OWN):
        callees += _layer_methods(value)
    elif isinstance(value, type) and (made := constructors(value, watch)):
        callees += made
        _watch_name(holder, name, watch)
    elif isinstance(value, types.ModuleType) or is_outside(owner) or owner.startswith(MANAGEMENT):
        return
    elif (text := _value(value)) is not None:
        values[where] = text
        _watch_name(holder, name, watch)


def _layer_methods(cls: type) -> list[Callable[..., Any]]:
    """The methods of our own layer, which a form puts in place of a host's."""
    own = vars(cls).values() if issubclass(cls, torch.nn.Module) else ()
    return [value for value in own if isinstance(value, types.FunctionType)]


def _watch_name(holder: Owner, name: str, watch: Watch) -> None:
    if isinstance(holder, type):
        watch.add_attribute(holder, name)
    else:
        watch.add(holder, name)


def _value(value: Any) -> str | None:
    """A plain value as text, which a graph file keeps; a long one as its hash."""
    text = _written(value)
    if text is None or len(text) <= _LONGEST:
        return text
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def _written(value: Any) -> str | None:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (Enum, SDPBackend)):
        return str(value)
    if isinstance(value, (list, tuple)) and len(value) < 64:
        texts = [_value(v) for v in value]
        return None if any(t is None for t in texts) else f"[{', '.join(map(str, texts))}]"
    return None


def is_outside(module: str | None) -> bool:
    """Tell whether a module is torch's, Python's own, or a library that only computes."""
    return module is None or module.partition(".")[0] in _FOREIGN


def _module_name(function: Callable[..., Any]) -> str:
    """A function's module; our own package has one name, whatever the host mangles it to."""
    return _known_as(function.__module__ or "")


def _known_as(module: str) -> str:
    """A module's name on any machine: the host calls other packs' by the paths of their folders."""
    if module.startswith(OWN):
        return f"warmgraph{module[len(OWN) :]}"
    return re.split(r"[\\/]", module)[-1]


# --- functions that are neither the host's nor torch's --------------------------------------------


def is_foreign(part: Callable[..., Any]) -> bool:
    """Tell whether a function's code is another pack's: not the host's, torch's or ours."""
    home = origin(part)
    return not (is_outside(home) or home.startswith((OWN, "comfy")))


def _is_outside(function: Callable[..., Any]) -> bool:
    """Torch's and Python's own; a wrapper of theirs around the host's code is not, nor is another
    pack's around theirs."""
    return is_outside(function.__module__) and is_outside(origin(function) or None)


def _replaced_in_torch(cls: type, watch: Watch) -> list[Callable[..., Any]]:
    """Replacements of torch's own methods of a layer."""
    found: list[Callable[..., Any]] = []
    for owner in cls.__mro__:
        for name in _OF_TORCH if is_outside(owner.__module__) else ():
            function = vars(owner).get(name)
            if not isinstance(function, types.FunctionType):
                continue
            watch.add(owner, name)
            if not _is_outside(function):
                found.append(function)
            else:
                found += _replaced_operators(function.__code__, watch)
    return found


def _replaced_operators(code: types.CodeType, watch: Watch) -> list[Callable[..., Any]]:
    """Replacements of torch's own operators that a code object names."""
    found: list[Callable[..., Any]] = []
    for owner, name in _operators(code):
        watch.add(owner, name)
        function = namespace(owner).get(name)
        if isinstance(function, types.FunctionType) and not _is_outside(function):
            found.append(function)
    return found


@lru_cache(maxsize=4096)
def _operators(code: types.CodeType) -> list[tuple[Owner, str]]:
    """(owner, name) of torch's operators that a code object may reach, through torch's own."""
    functional = vars(torch.nn.functional)
    owners: list[Owner] = [functional, vars(torch), torch.Tensor]
    found: dict[tuple[int, str], tuple[Owner, str]] = {}
    names = [name for inner in codes(code) for name in inner.co_names]
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        for owner in owners:
            value = namespace(owner).get(name)
            if value is None:
                continue
            found[id(owner), name] = (owner, name)
            inner = getattr(value, "__code__", None)
            if inner is not None and owner is functional and _is_outside(value):
                names += inner.co_names
    return list(found.values())


def _layers(function: Any, depth: int = 0) -> str:
    """The nesting of wrapped functions, outermost first."""
    inside = []
    for cell in function.__closure__ or () if depth < _DEEPEST else ():
        if _holds_function(cell):
            inside.append(_layers(cell.cell_contents, depth + 1))
        elif is_operator(_content(cell)):
            inside.append(cell.cell_contents.__name__)
    return f"{hash_code(function.__code__)}({','.join(inside)})"


def is_operator(value: Any) -> bool:
    """Tell whether something is an operator of torch itself, written in C++."""
    home = str(getattr(value, "__module__", None) or "")
    return isinstance(value, types.BuiltinFunctionType) and home.startswith("torch")


def wrapped_functions(function: Any) -> list[Any]:
    """Return the functions that a function closes over, which it wraps."""
    cells = function.__closure__ or ()
    return [cell.cell_contents for cell in cells if _holds_function(cell)]


def _holds_function(cell: Any) -> bool:
    return isinstance(_content(cell), types.FunctionType)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None
