"""What a look at one thing has found."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """One line of the doctor's.

    Attributes:
        name: what was looked at.
        ok: whether nobody has to do anything about it.
        text: what it is like, or what is wrong and what to do.
    """

    name: str
    ok: bool
    text: str
