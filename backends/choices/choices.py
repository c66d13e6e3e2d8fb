"""What chooses the kernels of a graph's operators at run time."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..operators.call_context import Choice
from .attention_choice import AttentionChoice
from .products import Products


class Choices(NamedTuple):
    """Of attention, and of products by quantised weights; None leaves one to the host."""

    attention: Choice | None
    products: Products | None

    @classmethod
    def kept(cls, directory: Path, machine: str) -> Choices:
        """Make the choices that measure.

        Args:
            directory: where they keep their times, the pack's private folder.
            machine: a name for this machine's card and PyTorch.
        """
        return cls(AttentionChoice(directory, machine), Products(directory, machine))


HOSTS = Choices(None, None)
