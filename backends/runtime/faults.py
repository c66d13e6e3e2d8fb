"""What failed in our code in one session: the host runs it until the model is loaded again.

A prompt that the host would have finished never fails because of us. Exceptions of our own code are
caught where they can be told from the host's, logged once with their trace, and that part is not
tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from ..host_api.execution import is_interrupt
from ..reasons import Reason, joined, of

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: The part that stands for all that happens around a call.
STEP = "steps"
#: The part that stands for captured calls.
CAPTURES = "captured calls"
#: The part that stands for watching a step, to learn how a model calls its blocks.
LEARNING = "learning"
#: What people are told about a run; no call hangs on it.
TELLING = "telling"
_COSTS: dict[Hashable, Reason] = {TELLING: of("report_may_lack")}
_COST = of("until_loaded_anew")


class Faults:
    """The parts of one root module's runtime that failed."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Reason] = {}
        self._told: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._found)

    def spare(
        self, part: Hashable, doing: str, task: Callable[..., T], *args: Any, **named: Any
    ) -> T | None:
        """Run optional work; log and return None if it raises.

        Raises:
            The host's interrupt alone.
        """
        try:
            return task(*args, **named)
        except Exception as error:
            if is_interrupt(error):
                raise
            self.note(part, doing, error)
            return None

    def note(self, part: Hashable, label: str, error: BaseException) -> Reason:
        """Turn a part off; the log has the trace, once.

        Returns:
            What to tell in a report.
        """
        sort, text = type(error).__name__, _first_line(error)
        failed = of("failed", what=label, sort=sort, error=text)
        words = joined([failed, _COSTS.get(part, _COST)])
        self._found[part] = words
        if words not in self._told:
            self._told.add(words)
            logger.warning("%s", words, exc_info=error)
        return words

    def of(self, part: Hashable) -> Reason | None:
        """Why a part is off, if it is."""
        return self._found.get(part)

    def clear(self) -> None:
        """Try everything again: the model was loaded or described anew."""
        self._found.clear()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no text")[:200]
