"""Builds jobs in worker processes: starts these on demand, and ends them when they are idle.

Threads: one supervisor, one for each worker process, and a build farm's where there is one.
Callbacks (a Future's, listeners, `is_busy`, `workers`, `time_limit_s`) run in those threads and
never under a lock. No method waits for a build.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import BuildError, CancelledBuildError
from ..events import Event, Events
from ..reasons import of
from .jobs import CLOSED, Entry, Jobs
from .pacing import WORKERS_WHILE_BUSY, BuildProgress, MeasuringGate
from .worker_process import Keeper, sweep_aside
from .worker_thread import WorkerThread

logger = logging.getLogger(__name__)

START_DEATHS = 3
#: How often workers that only die at their start are believed to die of something that passes.
BELIEFS = 2
_STAGGER_S = 0.03
_TICK_S = 0.5
#: How often listeners hear of what is being built although nothing of it has ended.
_TELL_S = 2.0
_CLOSE_S = 5.0


class Builder(Jobs):
    """Builds jobs in worker processes."""

    def __init__(
        self,
        *,
        hello: dict[str, Any],
        spool: Path,
        workers: Callable[[], int],
        time_limit_s: Callable[[], float],
        idle_s: float = 30.0,
        start_limit_s: float = 300.0,
        is_busy: Callable[[], bool] = lambda: False,
        events: Events | None = None,
        script: Path | None = None,
    ) -> None:
        """Set the builder up; no process starts before the first job.

        Args:
            hello: JSON-plain data that every worker gets first; "cwd" is its working directory,
                "threads" (default 1) the threads of its libraries; "cache" and "spool" are added.
            spool: private folder for what workers remember; made if missing.
            workers: upper bound of the workers, asked when there are jobs and no worker lives
                (their own memory would weigh in the answer).
            time_limit_s: seconds that a job may take, asked for each job; waiting for permission to
                measure does not count.
            idle_s: seconds after which a worker without a job goes.
            start_limit_s: seconds that a worker may take until it is ready.
            is_busy: whether a prompt runs now; then few workers are started, and one at a time
                measures on the GPU.
            events: is told, in the supervisor's thread, of changes of the progress; several may be
                told as one, and what is being built moves on by itself.
            script: the worker script; default that of the room `worker`.
        """
        super().__init__()
        self._hello = {**hello, "spool": str(spool)}
        self._spool = spool
        self._keeper = Keeper()
        self._workers = workers
        self._time_limit_s = time_limit_s
        self._idle_s = idle_s
        self._start_limit_s = start_limit_s
        self._events = events or Events()
        self._script = script or Path(__file__).parents[1] / "worker" / "main.py"
        self._gate = MeasuringGate(is_busy)
        self._owner = os.getpid()
        # All below is guarded by the lock of the jobs.
        self._threads: list[WorkerThread] = []
        self._limit = 0
        self._next_start = 0.0
        self._start_deaths = 0
        self._given_up = 0
        self._told = 0.0
        self._supervisor = threading.Thread(
            target=self._supervise, name="warmgraph-builder", daemon=True
        )
        self._supervisor.start()
        atexit.register(self.close)

    def progress(self) -> BuildProgress:
        """Return where the current batch stands."""
        return self._progress(self._limit, len(self._threads))

    def cancel(self) -> int:
        """Drop what waits and kill what is being built here; returns how many jobs those were.

        A pause ends with them, so what is asked for next is built. Their Futures are cancelled,
        or end with a `CancelledBuildError`. Builds on other machines finish and are kept.
        """
        with self._news:
            waiting = self._waiting
            self._paused = False
            self._drop(waiting)
            for entry in waiting:
                self._forget(entry)
            for entry in self._running:
                entry.cancelled = True
            number = len(waiting) + sum(not entry.lent for entry in self._running)
            # One that still starts is no worker yet; it finds nothing to do.
            threads = [thread for thread in self._threads if thread.is_ready]
        for thread in threads:
            thread.condemn(CancelledBuildError().reason)
        for entry in waiting:
            if entry.future.cancel():
                entry.future.set_running_or_notify_cancel()
        with self._news:
            self._announce()
        return number

    def close(self) -> None:
        """Kill all workers and fail what is left; returns when they are gone, or after 5 s.

        Safe to call twice, from any thread (a callback's too), and in a fork of the process, where
        it does nothing.
        """
        if os.getpid() != self._owner:
            return
        with self._news:
            self.closed = True
            left = self._waiting + [entry for entry in self._running if entry.lent]
            self._waiting = []
            self._running = [entry for entry in self._running if not entry.lent]
            threads = list(self._threads)
            self._news.notify_all()
        atexit.unregister(self.close)
        for thread in threads:
            thread.condemn(CLOSED)
        for entry in left:
            self._end(entry, BuildError(CLOSED))
        until = time.monotonic() + _CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if threading.current_thread() is not self._supervisor:
            self._supervisor.join(max(0.0, until - time.monotonic()))

    # For the workers' threads.

    def hand_out(self, thread: WorkerThread) -> Entry | None:
        """Wait for the largest job; None when this worker is to go: idle, condemned or closed."""

        def may_have() -> bool | None:
            return None if thread.condemned else True

        with self._news:
            entry = self.take(self._idle_s, lent=False, may_have=may_have)
            if entry is None:
                # Off the list under the same lock: a job that comes now gets a new worker.
                self._remove(thread)
            return entry

    def ready(self) -> None:
        """Note that workers do start here."""
        with self._news:
            self._start_deaths = self._given_up = 0

    def gone(self, thread: WorkerThread, failure: BuildError | None) -> None:
        """Note a worker's end; give up when workers only ever die at their start."""
        given_up: list[Entry] = []
        with self._news:
            self._remove(thread)
            if failure and not self.closed:
                self._start_deaths += 1
                if self._start_deaths >= START_DEATHS:
                    self._limit = len(self._threads)  # those that started, or still do, go on
                if self._limit == 0:
                    self._start_deaths = 0
                    self._given_up += 1
                if self._limit == 0 or failure.final:
                    is_final = failure.final or self._given_up >= BELIEFS
                    given_up = self._give_up(failure, final=is_final)
            self._announce()
        if failure:
            logger.debug("A build worker did not start: %s", failure, exc_info=failure)
            self._fail(given_up, failure)

    # The supervisor.

    def _supervise(self) -> None:
        with contextlib.suppress(OSError):
            self._spool.mkdir(parents=True, exist_ok=True, mode=0o700)
        sweep_aside(self._spool)
        while True:
            try:
                if not self._tick():
                    return
            except Exception:
                logger.exception("The builder's supervisor failed and goes on")
                time.sleep(_TICK_S)

    def _tick(self) -> bool:
        """Start and stop what is due, tell who listens, wait for news; False when closed."""
        with self._news:
            changed, self._changed = self._changed, False
            threads = list(self._threads)
            asked = self._waiting_here() > 0 and not threads and self._start_deaths == 0
        if asked:
            limit = self._ask_workers()
            with self._news:
                self._limit = limit
        now = time.monotonic()
        for thread in threads:
            thread.expire(now)
        next_start_s = self._start_worker(now)
        if changed or (self._running and now - self._told >= _TELL_S):
            self._told = now
            self._events.publish(Event.BUILDS_CHANGED)
        with self._news:
            if not self._changed and not self.closed:
                self._news.wait(next_start_s or (_TICK_S if self._threads else None))
            return not self.closed

    def _start_worker(self, now: float) -> float | None:
        """Start one worker if there is work and room for it; returns seconds until the next."""
        busy = self._waiting_here() > 0 and self._gate.is_busy()
        with self._news:
            room = WORKERS_WHILE_BUSY if busy else self._limit
            running = sum(not entry.lent for entry in self._running)
            wanted = min(self._limit, self._waiting_here() + running)
            if self.closed or len(self._threads) >= wanted:
                return None
            if len(self._threads) >= room:
                return _TICK_S  # look again: the prompt may have ended
            if now < self._next_start:
                return self._next_start - now
            self._next_start = now + _STAGGER_S
            thread = WorkerThread(
                self,
                script=self._script,
                hello=self._hello,
                keeper=self._keeper,
                gate=self._gate,
                time_limit_s=self._time_limit_s,
                start_limit_s=self._start_limit_s,
            )
            self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError as error:
            self.gone(thread, BuildError(of("worker_no_start", error=error)))
        return _STAGGER_S

    def _ask_workers(self) -> int:
        try:
            return max(1, self._workers())
        except Exception:
            logger.exception("Could not ask for the number of build workers; using one")
            return 1

    def _waiting_here(self) -> int:
        """How many jobs wait for a worker of this machine."""
        return 0 if self._paused else sum(not entry.lent for entry in list(self._waiting))

    def _remove(self, thread: WorkerThread) -> None:
        if thread in self._threads:
            self._threads.remove(thread)
