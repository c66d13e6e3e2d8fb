"""One figure of the headline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """One headline figure: where it stands in the case files, its unit and its bar.

    Attributes:
        any_of: made from those of the cases that are there, not only from all of them.
    """

    unit: str
    cases: tuple[str, ...]
    read: Callable[..., Any]
    bar: str = ""
    any_of: bool = False


def speedup(size: str) -> Callable[..., Any]:
    """Read a row's own speed-up."""
    return lambda case: case["rows"][size]["speedup"]


def largest(key: str) -> Callable[..., Any]:
    """Read the largest number of that name; every case has one."""
    return lambda *cases: max(case[key] for case in cases)
