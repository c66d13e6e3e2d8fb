"""Whether a graph can replace another pack's function, judged from its code without running it.

A graph is a pure function of weights and activations. A pack's function that only passes on its
arguments, or computes with them, can be part of one; one that keeps what it computes, or reads what
may change between calls, cannot, and this module says why.
"""

from __future__ import annotations

import builtins
import dis
import logging
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from ..reasons import Reason, of
from .bytecode import codes, global_chains
from .sources import is_foreign, is_operator, is_outside

#: The one argument that a replaced forward may keep: the host's own notes on the step.
OPTIONS = "transformer_options"
_REFLECTION = frozenset(
    (
        *("getattr", "setattr", "delattr", "hasattr", "vars", "globals", "locals"),
        *("eval", "exec", "compile", "open", "input", "dir"),
    )
)
_KNOWN_HOMES = frozenset(
    (
        *("torch", "comfy", "math", "functools", "operator", "itertools", "einops"),
        *("builtins", "typing", "numbers", "logging"),
    )
)
#: Of Python's own what only computes, too.
_PURE = frozenset(
    (
        *("abc", "collections", "contextlib", "copy", "dataclasses", "enum", "re", "types"),
        *("_abc", "_collections_abc", "_operator", "cmath", "numpy", "typing_extensions"),
    )
)
#: Of torch what tells whether code is being traced.
_TRACED = frozenset(("is_compiling", "is_dynamo_compiling", "is_exporting"))
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
_IGNORED = frozenset(
    ("CACHE", "EXTENDED_ARG", "PRECALL", "PUSH_NULL", "NOP", "RESUME", "COPY_FREE_VARS")
)


def objection(function: Callable[..., Any], *, settings: bool = False) -> Reason | None:
    """Say why no graph can replace another pack's function, or None if one can.

    Args:
        function: one whose code is not the host's, torch's or ours (`sources.is_foreign`).
        settings: whether it may close over numbers and texts, which the caller checks itself.
    """
    for value in defaults(function):
        if value and not is_plain(value):
            return of("default_may_change")
    return code_objection(function, settings=settings)


def defaults(function: Any) -> tuple[Any, ...]:
    """Return the defaults of a function's arguments."""
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def is_plain(value: Any) -> bool:
    """Tell whether a value is immutable."""
    return all(map(is_plain, value)) if type(value) is tuple else isinstance(value, _PLAIN)


def is_pure(module: str) -> bool:
    """Tell whether the functions of a module of torch or Python depend on nothing that other code
    may set.
    """
    return module.partition(".")[0] in _KNOWN_HOMES | _PURE


def code_objection(function: Callable[..., Any], *, settings: bool = False) -> Reason | None:
    """As `objection`, regardless of its arguments' defaults."""
    free = _free(function)
    for code in codes(function.__code__):
        problem = _problem_of_code(code, free, function.__code__, settings)
        if problem is not None:
            return problem
        for chain in global_chains(code):
            problem = _problem_of_global(function.__globals__, chain)
            if problem is not None:
                return problem
    return None


def options_kept(function: Callable[..., Any]) -> list[tuple[Any, str]]:
    """Return where a function, or one that it wraps, keeps the step's options: (object, attribute),
    innermost last.

    A graph in its place puts them there, too.
    """
    kept: list[tuple[Any, str]] = []
    pending, seen = [function], set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        free = _free(one)
        if is_foreign(one):
            kept += [
                (free[owner.argval], store.argval)
                for _, owner, store in _keeping(one.__code__)
                if owner.argval in free
            ]
        pending += [value for value in free.values() if isinstance(value, types.FunctionType)]
    return kept


def _problem_of_code(
    code: types.CodeType, free: dict[str, Any], outer: types.CodeType, settings: bool
) -> Reason | None:
    keeping = _keeping(code) if code is outer else []
    allowed = {id(one) for _, owner, store in keeping for one in (owner, store)}
    steps = [one for one in _instructions(code) if id(one) not in allowed]
    for one in steps:
        name, operation = one.argval, one.opname
        if operation == "IMPORT_NAME":
            return of("imports")
        if operation in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
            operation in ("STORE_DEREF", "DELETE_DEREF") and name in free
        ):
            return of("keeps", name=name)
        if operation in ("STORE_ATTR", "DELETE_ATTR"):
            return of("sets", name=name)
    for one in steps:
        name, operation = one.argval, one.opname
        held = operation.startswith("LOAD_") and "DEREF" in operation and name in free
        known = held and (_is_fixed(free[name]) or (settings and isinstance(free[name], _PLAIN)))
        if held and not known:
            return of("reads_changing", name=name)
        if operation in ("LOAD_ATTR", "LOAD_METHOD") and name == "__dict__":
            return of("reads_dict")
    return None


def _is_fixed(value: Any) -> bool:
    """Tell whether what a function closes over only computes, judged from its code."""
    if isinstance(value, types.ModuleType):  # imported within the function around it
        return value.__name__.partition(".")[0] in _KNOWN_HOMES
    return isinstance(value, types.FunctionType) or is_operator(value)


def _problem_of_global(scope: dict[str, Any], chain: list[str]) -> Reason | None:
    name = ".".join(chain)
    if chain[0] not in scope:
        if chain[0] in _REFLECTION:
            return of("calls", name=chain[0])
        return None if hasattr(builtins, chain[0]) else of("reads_missing", name=chain[0])
    value = scope[chain[0]]
    for part in chain[1:]:
        if not isinstance(value, (types.ModuleType, type)):
            break
        if not hasattr(value, part):
            return of("reads_missing", name=name)
        value = getattr(value, part)
    if isinstance(value, (*_PLAIN, logging.Logger)):
        return None
    if isinstance(value, types.FunctionType):
        home = str(value.__module__)
        if home.startswith("torch") and value.__name__ in _TRACED:  # answers differently in a trace
            return of("calls", name=name)
        return of("reads_changing", name=name) if is_outside(home) and not is_pure(home) else None
    module = value.__name__ if isinstance(value, types.ModuleType) else _home(value)
    if module.partition(".")[0] in _KNOWN_HOMES:
        return None
    return of("reads_changing", name=name)


def _home(value: Any) -> str:
    if not callable(value):
        return ""
    module = getattr(value, "__module__", None)
    return str(module or getattr(getattr(value, "__self__", None), "__name__", "builtins"))


@lru_cache(maxsize=256)
def _keeping(code: types.CodeType) -> list[tuple[Any, Any, Any]]:
    """Instructions of `outer.NAME = transformer_options`: (value, owner, store)."""
    steps = list(_instructions(code))
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    stored = {n for s in steps if "STORE_FAST" in s.opname for n in _names(s.argval)}
    if OPTIONS not in arguments or OPTIONS in stored:
        return []
    return [
        (value, owner, store)
        for value, owner, store in zip(steps, steps[1:], steps[2:], strict=False)
        if store.opname == "STORE_ATTR"
        and owner.opname == "LOAD_DEREF"
        and owner.argval in code.co_freevars
        and value.opname.startswith("LOAD_FAST")
        and value.argval == OPTIONS
    ]


def _names(argument: Any) -> tuple[Any, ...]:
    return argument if isinstance(argument, tuple) else (argument,)


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    return iter(_read(code))


@lru_cache(maxsize=256)
def _read(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(i for i in dis.get_instructions(code) if i.opname not in _IGNORED)


def _free(function: Any) -> dict[str, Any]:
    """The current values of a function's free variables."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            found[name] = cell  # nothing yet
    return found
