"""Output of every command: lines without control characters, errors in words."""

from __future__ import annotations

import sys
from typing import TextIO


def say(text: str, file: TextIO | None = None) -> None:
    """Print one line without control characters, whatever its origin."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    print(line, file=file, flush=True)


def say_lines(text: str) -> None:
    """Print a text of several lines; a tab at a line's beginning is kept as four spaces."""
    for line in text.splitlines():
        say(line.expandtabs(4))


def stop(message: str) -> int:
    """Say why a command failed; returns its exit status."""
    say(message, sys.stderr)
    return 2


def words(error: BaseException) -> str:
    """An error's text; a MemoryError has none."""
    return str(error) or "there is not enough memory to read it"
