"""What the log is told of graphs, each thing once."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Said:
    """What was said already in this process."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, text: str) -> None:
        """Warn once."""
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)

    def detail(self, what: str, error: BaseException) -> None:
        """Write an error's causes to the log, a worker's trace among them; the same ones once."""
        if error.__cause__ is None:
            return
        cause = str(error.__cause__)
        frames = [line for line in cause.splitlines() if line.startswith('  File "')]
        mark = "\n".join(frames) or cause
        if mark not in self._said:
            self._said.add(mark)
            logger.info("Warmgraph: %s, in detail:", what, exc_info=error)
