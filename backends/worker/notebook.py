"""Intermediate results of a build, for a developer who asked for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)


class Notebook:
    """A folder for intermediate results of a build; without one nothing is made or written."""

    def __init__(self, folder: str | None) -> None:
        """Set up; nothing is written yet.

        Args:
            folder: the folder, None for none.
        """
        self._folder = None if folder is None else Path(folder)

    def write(self, name: str, make: Callable[[], str]) -> None:
        """Write a text; on failure the build goes on.

        Args:
            make: returns the text; called only if it is wanted.
        """
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / name).write_text(make(), "utf-8")
        except Exception as error:  # torch may fail at printing its own result
            logger.warning("%s could not be written into %s: %s", name, self._folder, error)
