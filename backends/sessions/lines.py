"""The sentences that people read, as data: a key, its values, and its English.

A page shows another language by the key, with the reasons that stand in a sentence, which are data
likewise (`reasons`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..english import english
from ..errors import WarmgraphError
from ..reasons import Reason

#: Each sentence with {names} for what stands in it.
ENGLISH = english("lines")


class Line(NamedTuple):
    """One sentence.

    Attributes:
        key: of it in ENGLISH, and in the pages' languages.
        values: its values, by name.
        text: the sentence in English.
    """

    key: str
    values: dict[str, str]
    text: str

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON-plain data; those of its values that are reasons once more as such."""
        items = self.values.items()
        reasons = {n: v.to_plain() for n, v in items if isinstance(v, Reason) and v.key}
        return {**self._asdict(), **({"reasons": reasons} if reasons else {})}


def line(key: str, **values: object) -> Line:
    """Make the sentence of this key with these values; one of our errors stands as its `told`."""
    texts = {name: _text(value) for name, value in values.items()}
    return Line(key, texts, ENGLISH[key].format(**texts))


def _text(value: object) -> str:
    if isinstance(value, WarmgraphError):
        return value.told
    return value if isinstance(value, Reason) else str(value)


class RefusedError(ValueError):
    """A page's request is refused; `line` says why, in words that the page can translate."""

    def __init__(self, key: str, **values: object) -> None:
        self.line = line(key, **values)
        super().__init__(self.line.text)


def told(reason: str | None) -> dict[str, Any]:
    """Return a reason as JSON-plain data: in English, and as pages translate it, if they can."""
    plain = Reason.plain(reason or "")
    return {"reason": reason, "reason_line": plain.to_plain() if plain.key else None}


def plain(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return lines as JSON-plain data."""
    return [each.to_plain() for each in lines]


def in_english(lines: Iterable[Line]) -> str:
    """Put lines below one another."""
    return "\n".join(each.text for each in lines)
