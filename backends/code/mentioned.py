"""Which names the code of the host's models mentions, and so may read from its options.

An option whose name does not occur there, as a text or as an argument's name, cannot be read.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec

from .bytecode import codes
from .packs import OWN

#: Modules, and packages with a dot at their end, whose code runs within a model's forward; ours
#: among them.
READERS = (
    "comfy.ldm.",
    *("comfy.ops", "comfy.rmsnorm", "comfy.utils"),
    *("comfy.model_management", "comfy.memory_management", "comfy.pinned_memory"),
    *("comfy.model_prefetch", "comfy.patcher_extension"),
    *(f"{OWN}.families.", f"{OWN}.operators."),
)


class Mentioned:
    """The texts in such code that this process has imported; for any thread."""

    def __init__(self) -> None:
        """Nothing is read yet."""
        self._texts: frozenset[str] = frozenset()
        self._read: frozenset[str] = frozenset()
        self._count = -1
        #: Whether some of it cannot be looked at, so that it may read anything.
        self._is_open = False

    def none_of(self, names: Iterable[str]) -> frozenset[str]:
        """Return those names that no such code mentions."""
        self._read_news()
        return frozenset() if self._is_open else frozenset(names) - self._texts

    def _read_news(self) -> None:
        count = len(sys.modules)
        if count == self._count:
            return
        mine = {name for name in list(sys.modules) if is_reader(name)}
        found = set(self._texts)
        for name in mine - self._read:
            code = _code_of(name)
            self._is_open |= code is None
            found.update(() if code is None else _texts(code))
        self._texts, self._read, self._count = frozenset(found), self._read | mine, count


def is_reader(module: str) -> bool:
    """Tell whether a module's code may read a model's options."""
    return any(module.startswith(r) if r.endswith(".") else module == r for r in READERS)


def _code_of(module: str) -> types.CodeType | None:
    """A module's code, from its file; None if it cannot be inspected."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if not isinstance(spec, ModuleSpec):
        return None
    if spec.origin is None and spec.submodule_search_locations is not None:  # a plain folder
        return compile("", module, "exec")
    try:
        code = spec.loader.get_code(module)  # type: ignore[union-attr]
    except (AttributeError, ImportError, OSError, SyntaxError):
        return None
    return code if isinstance(code, types.CodeType) else None


def _texts(code: types.CodeType) -> Iterator[str]:
    for inner in codes(code):
        yield from inner.co_varnames[: inner.co_argcount + inner.co_kwonlyargcount]
        pending = list(inner.co_consts)
        while pending:
            constant = pending.pop()
            if type(constant) is str:
                yield constant
            elif type(constant) in (tuple, frozenset):
                pending += constant


#: Of this process.
MENTIONED = Mentioned()
