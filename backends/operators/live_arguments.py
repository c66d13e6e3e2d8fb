"""What a call brings along for its attention, and a graph is given when it runs: masks, and
functions that attend. Which form they have, and whether there is a mask at all, is no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from .call_context import now


class LiveArgument:
    """Stands for one of them while a block is traced."""

    def __init__(self, name: str) -> None:
        """Set up for one name.

        Args:
            name: by which a call's own are known.
        """
        self.name = name


class LiveMask(LiveArgument):
    """Stands for a mask; it can be handed to attention alone."""


Made = TypeVar("Made", bound=LiveArgument)


def of_step(name: str) -> Any:
    """Return that of the block that is computed; None where it has none."""
    return of_call().get(name)


def of_call() -> Mapping[str, Any]:
    """Return all of the block that is computed, by their names."""
    return now().arguments or {}


def is_of_step(value: Any) -> bool:
    """Tell whether something is one of the block that is computed."""
    return any(value is each for each in of_call().values())


def given(name: str, made: type[Made]) -> Any:
    """Return what a form's reference calls the host's block with: in a region's call the step's own
    argument, as the host does.
    """
    arguments = now().arguments
    return made(name) if arguments is None else arguments.get(name)
