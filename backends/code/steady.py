"""Whether a function always does the same with the same arguments: then a CUDA graph with its
kernels may be replayed in its place.

It does if its code, and all that it calls, is known to keep no state: the host's, PyTorch's,
attention libraries', and packs' functions that only call those (`purity`).
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from ..reasons import Reason, of
from .bytecode import codes, global_chains
from .purity import OPTIONS, objection
from .sources import is_foreign

#: Packages whose functions launch kernels on what they are given, and keep nothing.
KERNELS = ("sageattention", "flash_attn", "xformers", "comfy_kitchen")
_UNKNOWN, _READS_OPTIONS = of("code_unknown"), of("reads_options")


class Steady(NamedTuple):
    """What is known of a function.

    Attributes:
        why_not: it may do something else the next time; None: it does not.
        name: equal for functions that do the same.
    """

    why_not: Reason | None
    name: Hashable


class _Known(NamedTuple):
    found: Steady
    cells: list[tuple[Any, Any]]


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def steady(function: Any) -> Steady:
    """Return what is known of a function; inspected once, and again if its values changed."""
    try:
        known = _known.get(function)
    except TypeError:  # cannot be weakly referenced
        return Steady(_UNKNOWN, None)
    if known is None or any(cell.cell_contents is not held for cell, held in known.cells):
        cells: list[tuple[Any, Any]] = []
        name: list[Hashable] = []
        why_not = _look(function, cells, name, set())
        known = _known[function] = _Known(Steady(why_not, tuple(name)), cells)
    return known.found


def _look(
    function: Any, cells: list[tuple[Any, Any]], name: list[Hashable], seen: set[int]
) -> Reason | None:
    """Why a function may do something else the next time; notes the function and its values."""
    if id(function) in seen:
        return None
    seen.add(id(function))
    if not isinstance(function, types.FunctionType):
        home = str(getattr(function, "__module__", None) or "").partition(".")[0]
        name.append(_identity(function))
        return None if home in (*KERNELS, "torch", "comfy") else _UNKNOWN
    name.append(function.__code__)
    try:
        held = [(cell, cell.cell_contents) for cell in function.__closure__ or ()]
    except ValueError:  # one that holds nothing yet
        return _UNKNOWN
    cells += held
    if is_foreign(function) and not _is_a_kernels(function):
        if (problem := objection(function, settings=True)) is not None:
            return problem
        if any(OPTIONS in _names(code) for code in codes(function.__code__)):
            return _READS_OPTIONS
        inner = [value for value in _globals_of(function) if isinstance(value, types.FunctionType)]
    else:
        inner = []
    for _, value in held:
        if callable(value):
            inner.append(value)
        else:
            name.append(_identity(value))
    wrapped = getattr(function, "__wrapped__", None)
    for each in inner if wrapped is None else [*inner, wrapped]:
        if (problem := _look(each, cells, name, seen)) is not None:
            return problem
    return None


def _names(code: types.CodeType) -> tuple[Any, ...]:
    return (*code.co_consts, *code.co_names, *code.co_varnames)


def _globals_of(function: types.FunctionType) -> list[Any]:
    """What a function's loaded names lead to."""
    found = []
    for code in codes(function.__code__):
        for chain in global_chains(code):
            value = function.__globals__.get(chain[0])
            for part in chain[1:]:
                if not isinstance(value, (types.ModuleType, types.FunctionType, type)):
                    break
                value = getattr(value, part, None)
            found.append(value)
    return found


def _is_a_kernels(function: Callable[..., Any]) -> bool:
    return str(function.__module__ or "").partition(".")[0] in KERNELS


def _identity(value: Any) -> Hashable:
    """An identity of a value that a function holds."""
    plain = isinstance(value, (bool, int, float, str, bytes, type(None)))
    return (type(value), value) if plain else (type(value), id(value))
