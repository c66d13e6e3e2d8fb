"""How every command talks: lines that cannot play tricks on a console, errors in words."""

from __future__ import annotations

import sys
from typing import TextIO


def say(text: str, file: TextIO | None = None) -> None:
    """Print one line that cannot play tricks on a console, whoever wrote what is in it."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    print(line, file=file, flush=True)


def say_lines(text: str) -> None:
    """Print a text of several lines; a tab at a line's beginning is kept as four spaces."""
    for line in text.splitlines():
        say(line.expandtabs(4))


def stop(message: str) -> int:
    """Say why a command cannot do what it was called for; returns its exit status."""
    say(message, sys.stderr)
    return 2


def words(error: BaseException) -> str:
    """An error's text; a lack of memory has none."""
    return str(error) or "there is not enough memory to read it"
