"""The result of one check."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """One line of the doctor's.

    Attributes:
        name: what was checked.
        ok: whether nothing needs to be done.
        text: its state, or what is wrong and what to do.
    """

    name: str
    ok: bool
    text: str
