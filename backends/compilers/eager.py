"""Compiler `eager`: the host's own code. It has no graphs, no requirements and is the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..contract import EAGER, Compiled, Measure, PayloadFacts, Program, Requirement
from ..errors import BuildError, GraphFileError, RequirementError
from ..reasons import of


class Eager:
    """Leaves every region to the host."""

    name = EAGER

    def requirements(self, device: str) -> Sequence[Requirement]:
        """Nothing is needed."""
        return ()

    def needs_to_build(self, device: str) -> Sequence[Requirement]:
        """Nothing is built."""
        return ()

    def fingerprint(self, device: str) -> dict[str, Any]:
        """Nothing is generated."""
        return {}

    def installed_fingerprint(self, device: str) -> dict[str, Any]:
        """Nothing is generated."""
        return {}

    def prepare_worker(self, folder: Path, *, suffix: str) -> None:
        """Nothing is built."""

    def compile(self, program: Program, *, measure: Measure) -> Compiled:
        """Never called: eager has no graphs."""
        raise BuildError(_NONE)

    def explain_failure(self, device: str) -> RequirementError | None:
        """Never called: eager has no graphs."""
        return None

    def load(self, payload: bytes, card: int | None = None) -> Callable[[list[Any]], Any]:
        """Never called: eager has no graphs."""
        raise GraphFileError(_NONE)

    def describe_payload(self, payload: bytes) -> PayloadFacts:
        """Never called with any of its own: eager has no graphs."""
        raise ValueError(_NONE)


_NONE = of("eager_compiles_nothing")
