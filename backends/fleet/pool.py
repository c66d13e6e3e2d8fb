"""Daemon threads for requests that may hang.

Not concurrent.futures, which joins its threads at exit: one of these may hang on a socket.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

SIZE = 8


class DaemonPool:
    """A few threads and one queue. They start with the first task, and end with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._started = False

    def put(self, task: Callable[[], object]) -> None:
        """Have a task done; what it raises is logged by its type alone."""
        with self._lock:
            if not self._started:
                self._started = True
                for _ in range(SIZE):
                    threading.Thread(
                        target=self._work, name="warmgraph-remote", daemon=True
                    ).start()
        self._tasks.put(task)

    def close(self) -> None:
        """End the threads behind the tasks that are waiting; nobody is waited for."""
        for _ in range(SIZE):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # its text may name an address
                logger.error("Warmgraph: work on the remote store failed: %s", type(error).__name__)
