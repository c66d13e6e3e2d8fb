"""Why something runs at normal speed, is not captured, is refused or was not built: as data.

Each reason is a key and its values. Code reads a reason's attributes, never its words; a page shows
another language by the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .english import english

#: The words of each reason by its key; docs/troubleshooting.md explains them. What begins with
#: "do_" is what to do.
ENGLISH = english("reasons")


class Traits(NamedTuple):
    """What the code asks of reasons.

    Attributes:
        expected: not worth a warning in the log.
        passes: it ends by itself, because what it waits for is coming.
        retry: what it prevented may be tried again in the next run.
        fleeting: likewise in the next step.
        outcome: it says what happens to a model, and `why`.
        capture_only: it speaks against a capture alone.
        other_way: it shows another way in which a learned model's blocks are called.
        of_model: another process would find the same of a model that is learned.
    """

    expected: bool = False
    passes: bool = False
    retry: bool = False
    fleeting: bool = False
    outcome: bool = False
    capture_only: bool = False
    other_way: bool = False
    of_model: bool = False


_NONE = Traits()
_ON_ITS_WAY = Traits(expected=True, passes=True)
_TRAITS = {
    **{key: Traits(of_model=True) for key in ENGLISH if key.startswith("learned_")},
    **dict.fromkeys(
        ("learned_another", "learned_option", "learned_not_called"),
        Traits(other_way=True, of_model=True),
    ),
    **dict.fromkeys(("at_normal_speed", "unless_captured"), Traits(outcome=True)),
    **dict.fromkeys(("being_compiled", "being_loaded", "compiled_elsewhere"), _ON_ITS_WAY),
    **dict.fromkeys(("learned_first", "learned_soon"), _ON_ITS_WAY),
    **dict.fromkeys(("no_file", "no_file_fits"), Traits(expected=True)),
    **dict.fromkeys(("no_gain", "no_room", "replays_otherwise"), Traits(retry=True)),
    **dict.fromkeys(("no_memory", "no_memory_capturing"), Traits(retry=True)),
    "moved": Traits(fleeting=True),
    "on_cpu": Traits(capture_only=True),
}


class Reason(str):
    """A reason: its English text, usable as any string; `of` makes one.

    Attributes:
        key: in `ENGLISH`; empty for plain words (`plain`).
        values: by name; other reasons may be among them.
        expected and the rest: see `Traits`.
    """

    key: str
    values: Mapping[str, str]
    expected: bool
    passes: bool
    retry: bool
    fleeting: bool
    outcome: bool
    capture_only: bool
    other_way: bool
    of_model: bool

    def __new__(cls, words: str, key: str = "", values: Mapping[str, str] | None = None) -> Reason:
        made = super().__new__(cls, words)
        made.key, made.values = key, values or {}
        traits = _TRAITS.get(key, _NONE)
        made.expected, made.passes, made.retry, made.fleeting = traits[:4]
        made.outcome, made.capture_only, made.other_way, made.of_model = traits[4:]
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


#: Where there is nothing to do, or nothing to say.
NOTHING = Reason("")


def of(key: str, /, **values: object) -> Reason:
    """Make the reason of this key with these values; several reasons for one name are joined."""
    texts = {name: _text(value) for name, value in values.items()}
    return Reason(ENGLISH[key].format(**texts), key, texts)


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
