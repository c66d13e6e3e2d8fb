"""What a call brings along for its attention, and a graph is given when it runs: masks, and
functions that attend. Which form they have, and whether there is a mask at all, is no part of it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, TypeVar


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


class _Thread(threading.local):
    def __init__(self) -> None:
        #: Those of the block that is computed; None where there is no step.
        self.arguments: Mapping[str, Any] | None = None


_thread = _Thread()


class attending_with:  # noqa: N801, no generator: it is entered for each block
    """Until this ends, let a graph's attention have these, by their names."""

    def __init__(self, arguments: Mapping[str, Any] | None) -> None:
        self._arguments = arguments

    def __enter__(self) -> None:
        self._before, _thread.arguments = _thread.arguments, self._arguments

    def __exit__(self, *_: object) -> None:
        _thread.arguments = self._before


def of_step(name: str) -> Any:
    """Return that of the block that is computed; None where it has none."""
    return None if _thread.arguments is None else _thread.arguments.get(name)


def of_call() -> Mapping[str, Any]:
    """Return all of the block that is computed, by their names."""
    return _thread.arguments or {}


def is_of_step(value: Any) -> bool:
    """Tell whether something is one of the block that is computed."""
    return any(value is each for each in (_thread.arguments or {}).values())


def given(name: str, made: type[Made]) -> Any:
    """Return what a form's reference calls the host's block with: in a region's call the step's own
    argument, as the host does.
    """
    return made(name) if _thread.arguments is None else _thread.arguments.get(name)
