"""Arguments of a call for its attention that a graph gets when it runs: masks and attention
functions. A graph depends on neither their form nor on whether there is a mask.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, TypeVar


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
    """Return the current block's; None if it has none."""
    return None if _thread.arguments is None else _thread.arguments.get(name)


def of_call() -> Mapping[str, Any]:
    """Return all of the current block, by name."""
    return _thread.arguments or {}


def is_of_step(value: Any) -> bool:
    """Tell whether something is one of the current block's."""
    return any(value is each for each in (_thread.arguments or {}).values())


def given(name: str, made: type[Made]) -> Any:
    """Return what a form's reference passes to the host's block: in a region's call the step's own
    argument, as in the host.
    """
    return made(name) if _thread.arguments is None else _thread.arguments.get(name)
