"""Masks of attention that a graph is given when it runs: which form they have, and whether there is
one at all, is no part of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any


class LiveMask:
    """Stands for a mask while a block is traced; it can be handed to attention alone."""

    def __init__(self, name: str) -> None:
        """Args: by which a call's masks are known."""
        self.name = name


class _Thread(threading.local):
    def __init__(self) -> None:
        #: The masks of the block that is computed; None where there is no step.
        self.masks: Mapping[str, Any] | None = None


_thread = _Thread()


@contextlib.contextmanager
def attending_under(masks: Mapping[str, Any] | None) -> Iterator[None]:
    """Until this ends, let a graph's attention have these masks, by their names."""
    before, _thread.masks = _thread.masks, masks
    try:
        yield
    finally:
        _thread.masks = before


def of_step(name: str) -> Any:
    """Return the mask of the block that is computed; None where it has none."""
    return None if _thread.masks is None else _thread.masks.get(name)


def is_of_step(value: Any) -> bool:
    """Tell whether something is a mask of the block that is computed."""
    return any(value is mask for mask in (_thread.masks or {}).values())


def given(name: str) -> Any:
    """Return what a form's reference calls the host's block with: in a region's call the step's own
    mask, as the host does.
    """
    return LiveMask(name) if _thread.masks is None else _thread.masks.get(name)
