"""Why something runs at normal speed, is not captured, is refused or was not built: as data.

Each reason is a key and its values. Code reads a reason's attributes, never its words; a page shows
another language by the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .reason_table import TABLE as TABLE
from .reason_table import Row as Row

_PLAIN = Row("{text}")


class Reason(str):
    """A reason: its English text, usable as any string; `of` makes one.

    Attributes:
        key: in `TABLE`; empty for plain words (`plain`).
        values: by name; other reasons may be among them.
        expected, passes, retry, fleeting, outcome: see `Row`.
    """

    key: str
    values: Mapping[str, str]
    expected: bool
    passes: bool
    retry: bool
    fleeting: bool
    outcome: bool

    def __new__(cls, words: str, key: str = "", values: Mapping[str, str] | None = None) -> Reason:
        made = super().__new__(cls, words)
        made.key, made.values = key, values or {}
        _, made.expected, made.passes, made.retry, made.fleeting, made.outcome = _row(key)
        return made

    @classmethod
    def plain(cls, words: str) -> Reason:
        """Return plain words as a reason; a reason as it is."""
        return words if isinstance(words, Reason) else cls(words)

    @property
    def cause(self) -> Reason:
        """The reason without its outcome."""
        return Reason.plain(self.values["why"]) if self.outcome else self

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON-plain data, for another process or a page."""
        values = {
            name: value.to_plain() if isinstance(value, Reason) and value.key else str(value)
            for name, value in self.values.items()
        }
        return {"key": self.key, "values": values, "text": str.__str__(self)}


def _row(key: str) -> Row:
    row = TABLE[key] if key else _PLAIN
    return Row(row) if isinstance(row, str) else row


def english_of(key: str) -> str:
    """Return the English of a key, with {names} in it."""
    return _row(key).english


#: Where there is nothing to do, or nothing to say.
NOTHING = Reason("")


def of(key: str, /, **values: object) -> Reason:
    """Make the reason of this key with these values; several reasons for one name are joined."""
    texts = {name: _text(value) for name, value in values.items()}
    return Reason(english_of(key).format(**texts), key, texts)


def joined(reasons: Iterable[str]) -> Reason:
    """Join reasons, at least one."""
    first, *others = map(Reason.plain, reasons)
    return of("both", one=first, other=joined(others)) if others else first


def with_remedy(reason: Reason, remedy: Reason) -> Reason:
    """Return a reason followed by what to do about it, if anything."""
    return joined([reason, remedy]) if remedy else reason


def _text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return joined(value)
    return value if isinstance(value, Reason) else str(value)
