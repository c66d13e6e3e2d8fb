"""A developer's switches for a server, in `WARMGRAPH_DEBUG`: read once, then a frozen value.

    WARMGRAPH_DEBUG=verify,dump,no-capture,only=KIND

A server without it has `OFF`; nothing here is read while a model runs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from .reasons import NOTHING, Reason, of

logger = logging.getLogger(__name__)

VARIABLE = "WARMGRAPH_DEBUG"
#: Where `dump` writes, below the pack's private folder.
FOLDER = "debug"
_VERIFY, _DUMP, _NO_CAPTURE, _ONLY = "verify", "dump", "no-capture", "only"
_KNOWN = f"{_VERIFY}, {_DUMP}, {_NO_CAPTURE}, {_ONLY}=KIND"


@dataclass(frozen=True)
class Debugging:
    """What a server does besides its work.

    Attributes:
        verify: whether each call of a region is compared with eager, whose result is used on a
            difference.
        dump: the folder in which each graph is written down, None for none.
        captures: whether calls may be captured as CUDA graphs; a replayed call cannot be verified.
        only: parts of the labels of those kinds that are compiled; empty: all are.
    """

    verify: bool = False
    dump: Path | None = None
    captures: bool = True
    only: tuple[str, ...] = ()

    @property
    def words(self) -> Reason:
        """The switches, for a report; empty for none."""
        asked = [_VERIFY] * self.verify + [_DUMP] * (self.dump is not None)
        asked += [_NO_CAPTURE] * (not self.captures and not self.verify)
        asked += [f"{_ONLY}={part}" for part in self.only]
        if not asked:
            return NOTHING
        key = "debugging" if self.captures else "debugging_uncaptured"
        return of(key, variable=VARIABLE, asked=",".join(asked))

    def why_not(self, label: str) -> Reason | None:
        """Say why a kind of this label is left to the host, or None."""
        lower = label.lower()
        if not self.only or any(part.lower() in lower for part in self.only):
            return None
        return of("debugging_only", variable=VARIABLE, parts=" and ".join(self.only))


OFF = Debugging()


def read_debugging(text: str, private: Path) -> Debugging:
    """Read the environment; an unknown word only costs a warning.

    Args:
        text: the variable's value, "" where it is not set.
        private: the pack's folder that no HTTP route reaches.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    pairs = [word.partition("=") for word in words]
    only = tuple(value.strip() for name, _, value in pairs if name.strip() == _ONLY)
    plain = {word for word in words if word in (_VERIFY, _DUMP, _NO_CAPTURE)}
    unknown = [w for w, (name, _, _) in zip(words, pairs, strict=True) if name.strip() != _ONLY]
    unknown = [ascii(word) for word in unknown if word not in plain]
    if "" in only:
        unknown.append("only= without a kind")
    if unknown:
        logger.warning(
            "%s: %s is not known and does nothing; known are %s, separated by commas",
            VARIABLE,
            ", ".join(unknown),
            _KNOWN,
        )
    debugging = Debugging(
        verify=_VERIFY in plain,
        dump=private / FOLDER if _DUMP in plain else None,
        captures=not plain & {_VERIFY, _NO_CAPTURE},
        only=tuple(part for part in only if part),
    )
    if debugging.words:
        logger.info("%s", debugging.words)
    if debugging.dump is not None:
        logger.info("Each graph is written down in %s", debugging.dump)
    return debugging
