"""Functions of the host that other packs replaced when they were imported, as data for a worker.

The worker runs the file that replaced a function, so that it traces what is bound here; nothing
else of the pack is run. Only functions that a graph can replace are described (`foreign`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..contract import PackFile
from ..errors import DescriptionError
from ..host_api.layers import NOT_TRACED
from ..kinds.module_tree import walk
from ..reasons import Reason, of
from .bytecode import codes, hash_code
from .packs import Pack, is_known, origin, owner_of, pack_of, pack_of_function
from .purity import objection
from .sources import is_foreign, wrapped_functions

_LARGEST_BYTES = 1 << 20


def describe_packs(
    described: dict[str, Any],
    classes: Sequence[type],
    through: Sequence[Callable[..., Any]],
) -> tuple[PackFile, ...]:
    """Return the files of other packs whose functions a region runs through, in import order.

    Args:
        described: the region's module tree (`describe.describe_module`).
        classes: of its modules.
        through: the functions that it runs through.

    Raises:
        DescriptionError: no graph can replace one of them, or its file is not what runs.
    """
    if (problem := _replaced_cast(classes)) is not None:
        raise DescriptionError(problem)
    guests = [f for f in through if pack_of_function(f) is not None]
    if not guests:
        return ()
    for cls in classes:
        pack = pack_of(cls.__module__)
        if pack is not None:
            raise DescriptionError(of("takes_part", name=cls.__qualname__, pack=pack.name))
    files: dict[str, PackFile] = {}
    for function in _in_order(guests):
        pack = pack_of_function(function)
        if pack is not None:
            what = _binding(function, classes)
            problem = objection(function) or _read_attribute(function, described, through)
            if problem is not None:
                raise DescriptionError(blame(pack.name, what, of("it_does", what=problem)))
            file = _file(pack, what, origin(function))
            if hash_code(function.__code__) not in _hashes(file.text, file.path):
                raise DescriptionError(
                    blame(pack.name, what, of("changed_since", file=pack.file.name))
                )
            files.setdefault(file.module, file)
    return tuple(files.values())


def _replaced_cast(classes: Sequence[type]) -> Reason | None:
    """Say what runs in place of a host layer while its weights are cast: graphs do not run it,
    because they get their weights cast, and no key covers it.
    """
    for cls in classes:
        for name in sorted(NOT_TRACED):
            owner = next((base for base in cls.__mro__ if name in vars(base)), None)
            if owner is not None and is_known(owner.__module__):
                function = vars(owner)[name]
                if isinstance(function, types.FunctionType) and is_foreign(function):
                    named = f"{owner.__name__}.{name}"
                    return of("pack_replaces", owner=owner_of(function), name=named)
    return None


def blame(pack: str, replaces: str, problem: Reason) -> Reason:
    """Say that a pack's function prevents a region from being compiled."""
    return of("blame", pack=pack, what=replaces, why=problem)


def _in_order(guests: Sequence[Any]) -> Iterator[Any]:
    """The functions, each after those that it wraps."""
    done: set[int] = set()

    def visit(function: Any) -> Iterator[Any]:
        if id(function) in done:
            return
        done.add(id(function))
        for inner in wrapped_functions(function):
            yield from visit(inner)
        if is_foreign(function):
            yield function

    for function in reversed(guests):
        yield from visit(function)


def _binding(function: Any, classes: Sequence[type]) -> str:
    """Where a function is bound, for people."""
    for cls in classes:
        for owner in cls.__mro__:
            for name, value in vars(owner).items():
                if getattr(value, "__func__", value) is function:
                    return f"{owner.__qualname__}.{name}"
    named: str = function.__qualname__
    return named.rpartition("<locals>.")[2]


def _read_attribute(
    function: Any, described: dict[str, Any], through: Sequence[Callable[..., Any]]
) -> Reason | None:
    """An attribute of the region's modules that only the pack's code reads, which its nodes may
    set.
    """
    theirs = {n for code in codes(function.__code__) for n in code.co_names}
    ours = {
        name
        for each in through
        if not is_foreign(each)
        for code in codes(each.__code__)
        for name in code.co_names
    }
    for _, module in walk(described):
        for name in module["attributes"]:
            if name in theirs - ours:
                layer = module["class"].rpartition(".")[2]
                return of("reads_of_a", name=name, layer=layer)
    return None


def _file(pack: Pack, what: str, module: str) -> PackFile:
    text = _text(pack, what)
    prefixes = [module[:at] for at, letter in enumerate(module) if letter == "."]
    parents = [
        (name, str(next(iter(paths))))
        for name in prefixes
        if (paths := getattr(sys.modules.get(name), "__path__", None))
    ]
    return PackFile(
        pack=pack.name,
        replaces=what,
        module=module,
        path=str(pack.file),
        folder="" if pack.folder is None else str(pack.folder),
        parents=tuple(parents),
        text=text,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )


def _text(pack: Pack, what: str) -> str:
    try:
        if pack.file.stat().st_size > _LARGEST_BYTES:
            raise DescriptionError(blame(pack.name, what, of("too_large", file=pack.file.name)))
        return importlib.util.decode_source(Path(pack.file).read_bytes())
    except (OSError, UnicodeError, SyntaxError) as error:
        problem = of("file_unreadable", file=pack.file.name, error=error)
        raise DescriptionError(blame(pack.name, what, problem)) from error


@lru_cache(maxsize=32)
def _hashes(text: str, path: str) -> frozenset[str]:
    """Of every code object that a file makes."""
    try:
        whole = compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return frozenset()
    return frozenset(hash_code(code) for code in codes(whole))
