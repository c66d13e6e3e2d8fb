"""Code objects as text and hashes, and the names that they load."""

from __future__ import annotations

import dis
import hashlib
import inspect
import sys
import types
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_HAS_DOCSTRING = 0x4000000  # a flag of code objects from Python 3.13 on


@lru_cache(maxsize=4096)
def hash_code(code: types.CodeType) -> str:
    """Return 16 hex digits for what a code object does, wherever it was written."""
    return hashlib.sha256(canonical_text(code).encode()).hexdigest()[:16]


@lru_cache(maxsize=4096)
def global_chains(code: types.CodeType) -> list[list[str]]:
    """Dotted names that a code object loads, as lists: `comfy.ops.f` -> ["comfy", "ops", "f"]."""
    chains: list[list[str]] = []
    open_chain: list[str] | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            open_chain = [instruction.argval]
            chains.append(open_chain)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and open_chain is not None:
            open_chain.append(instruction.argval)
        else:
            open_chain = None
    return chains


def codes(code: types.CodeType) -> Iterable[types.CodeType]:
    """Yield a code object and all those within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


@lru_cache(maxsize=4096)
def compares_identity(code: types.CodeType) -> bool:
    """Tell whether code compares identities, other than with what it names: None, or a class."""
    known = False  # whether the last load was such a name
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IS_OP" and not known:
            return True
        if instruction.opname in ("LOAD_CONST", "LOAD_GLOBAL"):
            known = True
        elif instruction.opname not in ("LOAD_ATTR", "EXTENDED_ARG", "CACHE"):
            known = False
    return False


def _constants(code: types.CodeType) -> tuple[Any, ...]:
    """A code object's constants without its docstring."""
    if sys.version_info >= (3, 13):
        documented = bool(code.co_flags & _HAS_DOCSTRING)
    else:  # a function's first constant is its docstring, or None
        documented = bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_name[0] != "<"
    return code.co_consts[1:] if documented else code.co_consts


def canonical_text(value: Any) -> str:
    """Write a code object or a constant as text, the same in every process."""
    if isinstance(value, types.CodeType):
        # Handlers and argument kinds are no part of the byte code.
        table = getattr(value, "co_exceptiontable", b"")  # Python 3.11 and newer
        flags = value.co_flags & ~_HAS_DOCSTRING
        kinds = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, flags)
        names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
        parts = (value.co_code.hex(), table.hex(), kinds, names)
        return repr(parts) + "".join(canonical_text(c) for c in _constants(value))
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(canonical_text(v) for v in value)) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(canonical_text(v) for v in value) + ")"
    if isinstance(value, types.FunctionType):
        return value.__qualname__
    if value is None or isinstance(value, (bool, int, float, str, bytes, complex)):
        return repr(value)
    return type(value).__name__
