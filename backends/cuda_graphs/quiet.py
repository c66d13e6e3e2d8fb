"""What may not happen while anything is captured, on whichever card and in whichever thread.

Garbage collection frees what may belong to a GPU, and giving unused memory back waits for all GPUs:
either ends a capture, and the process with it.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class Quiet:
    """The captures of this process. Several go on at once, each on its card."""

    def __init__(self) -> None:
        """Nothing is captured."""
        self._changed = threading.Condition()
        self._captures = 0
        self._loud = False
        self._was_enabled = False

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Capture something: until this ends nothing loud begins, and nothing is collected."""
        with self._changed:
            self._changed.wait_for(lambda: not self._loud)
            if not self._captures:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._captures += 1
        try:
            yield
        finally:
            with self._changed:
                self._captures -= 1
                if not self._captures:
                    if self._was_enabled:
                        gc.enable()
                    self._changed.notify_all()

    @contextlib.contextmanager
    def loud(self) -> Iterator[None]:
        """Do what ends captures: the ones that go on come to their end first. Not to be called by
        who captures.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._captures and not self._loud)
            self._loud = True
        try:
            yield
        finally:
            with self._changed:
                self._loud = False
                self._changed.notify_all()


#: Of this process: garbage collection is one for all of it.
QUIET = Quiet()
