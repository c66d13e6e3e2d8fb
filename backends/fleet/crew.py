"""Daemon threads that do tasks which may hang.

Not concurrent.futures, which joins its threads at exit: one of these may hang on a socket. Those
that hang are left behind, and others take their place, up to a bound.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

Task = Callable[[], None]
SIZE = 8
#: Threads that live at once, those that hang among them.
MOST = 32


class Crew:
    """A few threads and one queue; they start with the first task."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._working = False
        self._closed = False

    def put(self, task: Task) -> bool:
        """Have a task done; False where there is nobody to do it."""
        with self._lock:
            if self._closed or not (self._working or self._start()):
                return False
            self._tasks.put(task)
            return True

    def renew(self) -> None:
        """Leave those who hang; what waits is done by others, from the next task on."""
        with self._lock:
            before, self._tasks = self._tasks, queue.SimpleQueue()
            self._working = False
            while True:
                try:
                    task = before.get_nowait()
                except queue.Empty:
                    break
                if task is not None:
                    self._tasks.put(task)
            for _ in range(self._size):
                before.put(None)

    def close(self) -> None:
        """Take no more tasks; nobody is waited for."""
        with self._lock:
            self._closed = True
            for _ in range(self._size):
                self._tasks.put(None)

    def _start(self) -> bool:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) + self._size > MOST:
            return False
        for _ in range(self._size):
            thread = threading.Thread(
                target=self._work, args=(self._tasks,), name="warmgraph-remote", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._working = True
        return True

    def _work(self, tasks: queue.SimpleQueue[Task | None]) -> None:
        while (task := tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # its text may name an address
                logger.error("Warmgraph: work on the remote store failed: %s", type(error).__name__)
