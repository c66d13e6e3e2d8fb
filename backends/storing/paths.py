"""The folders of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Paths:
    """Where things are kept.

    Attributes:
        store: the shared store of graph files.
        private: the pack's folder that no HTTP route reaches.
        workflows: a user's workflows folder, None for a user that is not known.
    """

    store: Path
    private: Path
    workflows: Callable[[str | None], Path | None]

    @property
    def records(self) -> Path:
        """What was learned of models."""
        return self.private / "records"
