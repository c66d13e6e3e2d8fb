"""Arguments of a call for its attention that a graph gets when it runs: masks and attention
functions. A graph depends on neither their form nor on whether there is a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from .call_context import now


class LiveArgument:
    """Stands for such an argument while a block is traced."""

    def __init__(self, name: str) -> None:
        """Set up for one name.

        Args:
            name: by which a call's own argument is found.
        """
        self.name = name


class LiveMask(LiveArgument):
    """Stands for a mask; it can only be passed to attention."""


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
    """Return what a form's reference passes to the host's block: in a region's call the step's own
    argument, as in the host.
    """
    arguments = now().arguments
    return made(name) if arguments is None else arguments.get(name)
