"""The list of backends, and the one resolver that chooses among them and keeps every reason."""

from __future__ import annotations

from typing import NamedTuple

from ..contract import AUTO, Compiler, Requirement
from ..errors import RequirementError
from ..reasons import Reason, of, with_remedy
from .eager import Eager
from .inductor import Inductor

#: In order of preference; eager is always available and always last.
COMPILERS: tuple[Compiler, ...] = (Inductor(), Eager())
CHOICES = (AUTO, *(backend.name for backend in COMPILERS))


class Resolution(NamedTuple):
    """A chosen backend, and why those before it were not."""

    backend: Compiler
    refused: tuple[Reason, ...]


def backend_named(name: str) -> Compiler:
    """Return a backend by name.

    Raises:
        RequirementError: none has that name; the text lists the names.
    """
    for backend in COMPILERS:
        if backend.name == name:
            return backend
    names = ", ".join(b.name for b in COMPILERS)
    raise RequirementError(of("unknown_backend", names=names, got=repr(name)))


def resolve_backend(choice: str, device: str) -> Resolution:
    """Choose a backend for a device, by its type.

    "auto" takes the first whose requirements are met; an explicit choice never falls back.

    Raises:
        RequirementError: the explicit choice cannot work here, or no backend has that name.
    """
    if choice != AUTO:
        backend = backend_named(choice)
        if (unmet := _unmet(backend, device)) is not None:
            raise RequirementError(
                of("backend_unfit", name=choice, why=unmet.reason), remedy=unmet.remedy
            )
        return Resolution(backend, ())
    refused: list[Reason] = []
    for backend in COMPILERS:
        unmet = _unmet(backend, device)
        if unmet is None:
            return Resolution(backend, tuple(refused))
        why = with_remedy(unmet.reason, unmet.remedy)
        refused.append(of("backend_unfit", name=backend.name, why=why))
    raise AssertionError("eager has no requirements")


def _unmet(backend: Compiler, device: str) -> Requirement | None:
    return next((r for r in backend.requirements(device) if not r.met), None)
