"""Backend `eager`: the host's own code. It has no graphs, no requirements and is the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..contract import EAGER, Compiled, Measure, Requirement
from ..errors import BuildError, GraphFileError, RequirementError


class Eager:
    """Leaves every region to the host."""

    name = EAGER

    def requirements(self, device: str) -> Sequence[Requirement]:
        """Nothing is needed."""
        return ()

    def fingerprint(self, device: str) -> dict[str, Any]:
        """Nothing is generated."""
        return {}

    def compile(self, program: Any, *, measure: Measure) -> Compiled:
        """Never called: eager has no graphs."""
        self._refuse(BuildError)

    def explain_failure(self, device: str) -> RequirementError | None:
        """Never called: eager has no graphs."""
        return None

    def load(self, payload: bytes) -> Callable[[list[Any]], Any]:
        """Never called: eager has no graphs."""
        self._refuse(GraphFileError)

    def _refuse(self, error: type[BuildError] | type[GraphFileError]) -> NoReturn:
        raise error("backend eager has no graphs")
