"""Builds graphs in worker processes: a queue of jobs and a supervisor over the workers.

Threads: one supervisor, one for each worker process, and a build farm's where there is one.
Callbacks (a Future's, listeners, `is_busy`, `workers`, `time_limit_s`) run in those threads and
never under a lock. No method waits for a build.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ..errors import BuildError, CancelledBuildError
from ..events import Event, Events
from ..reasons import of
from .contract import BuildResult, Job
from .pacing import (
    WORKERS_WHILE_BUSY,
    BuildProgress,
    MeasuringGate,
    estimate_fraction,
    estimate_seconds_left,
    worker_count,
)
from .worker_process import Keeper, sweep_aside
from .worker_thread import Entry, WorkerError, WorkerThread

__all__ = [
    "BuildProgress",
    "BuildResult",
    "Builder",
    "Job",
    "WorkerError",
    "worker_count",
]

logger = logging.getLogger(__name__)

START_DEATHS = 3
#: How often workers that only die at their start are believed to die of something that passes.
BELIEFS = 2
_STAGGER_S = 0.03
_TICK_S = 0.5
#: How often listeners hear of what is being built although nothing of it has ended.
_TELL_S = 2.0
_CLOSE_S = 5.0
_CLOSED = of("compiling_ended")


class Builder:
    """Builds jobs in worker processes that start on demand and go when idle."""

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
            spool: private folder through which results travel; made if missing.
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
        self._hello = hello
        self._spool = spool
        self._keeper = Keeper(spool)
        self._workers = workers
        self._time_limit_s = time_limit_s
        self._idle_s = idle_s
        self._start_limit_s = start_limit_s
        self._events = events or Events()
        self._script = script or Path(__file__).parents[1] / "worker" / "main.py"
        self._gate = MeasuringGate(is_busy)
        #: How many workers of other machines build for this one; None where it is asked alone.
        self.elsewhere: int | None = None
        self._owner = os.getpid()
        # All below is guarded by the lock of `_news`, which is notified of every change.
        self._news = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._pending: list[tuple[int, int, Entry]] = []
        self._running: list[Entry] = []
        #: What waits for other machines; what they have is running and lent.
        self._lendable: list[tuple[int, int, Entry]] = []
        self._threads: list[WorkerThread] = []
        self._seconds: deque[float] = deque(maxlen=32)
        self._number = 0
        self._done = 0
        self._total = 0
        self._limit = 0
        self._next_start = 0.0
        self._start_deaths = 0
        self._given_up = 0
        #: Why nothing can be built while this process lives; read without the lock, too.
        self.verdict: BuildError | None = None
        #: Whether nothing is built any more; read without the lock, too.
        self.closed = False
        self._changed = False
        self._told = 0.0
        self._paused = False
        self._supervisor = threading.Thread(
            target=self._supervise, name="warmgraph-builder", daemon=True
        )
        self._supervisor.start()
        atexit.register(self.close)

    def submit(self, job: Job) -> Future[BuildResult]:
        """Queue a job and return at once; the Future ends with a `BuildResult` or a `BuildError`.

        A key that waits or is being built gets the same Future again, whoever asks; one that failed
        is tried anew, until it is known that none can be built here. A Future cancelled while it
        waits drops its job for all who share it; a job that runs cannot be cancelled.
        """
        with self._news:
            known = self._entries.get(job.key)
            if known and not known.future.done():
                return known.future
            self._number += 1
            entry = Entry(job, self._number)
            # Nothing in a lesson tells whose host it is true for.
            lent = self.elsewhere is not None and "description" in job.task
            queue = self._lendable if lent else self._pending
            refusal = BuildError(_CLOSED) if self.closed else None if lent else self.verdict
            if refusal is None:
                if not (self._pending or self._running or self._lendable):
                    self._done = self._total = 0
                self._entries[job.key] = entry
                heapq.heappush(queue, (-job.cost, entry.number, entry))
                self._total += 1
                self._announce()
        if refusal is not None:
            entry.future.set_exception(_copy_failure(refusal))
        return entry.future

    def progress(self) -> BuildProgress:
        """Return where the current batch stands."""
        now = time.monotonic()
        with self._news:
            done, total = self._done, self._total
            labels = [entry.job.label for entry in self._running]
            elapsed = [now - (entry.started or now) for entry in self._running]
            pending = len(self._pending) + len(self._lendable)
            measured = list(self._seconds)
            elsewhere = self.elsewhere or 0
            workers = min(max(1, self._limit + elsewhere), pending + len(elapsed))
            alive, paused = len(self._threads) + elsewhere, self._paused
        left = estimate_seconds_left(measured, elapsed, pending, workers)
        known = elapsed or (pending and not paused)
        fraction = round(estimate_fraction(measured, elapsed, done, total), 3)
        return BuildProgress(done, total, labels, left if known else None, alive, paused, fraction)

    def is_building(self) -> bool:
        """Whether a job is being built on this machine; asked at each step, so no lock is taken."""
        return self._running_here() > 0

    def pause(self, paused: bool) -> None:
        """Begin no build, or go on; those that run come to their end."""
        with self._news:
            self._paused = paused
            self._announce()

    def cancel(self) -> int:
        """Drop what waits and kill what is being built here; returns how many jobs those were.

        Nothing is left that a pause could hold up, so it ends: what is asked for next is built.
        Their Futures are cancelled, or end with a `CancelledBuildError`. What other machines have
        comes to its end and is kept.
        """
        with self._news:
            waiting = self._all_waiting()
            self._paused = False
            self._done += len(waiting)
            for entry in waiting:
                self._forget(entry)
            for entry in self._running:
                entry.cancelled = True
            number = len(waiting) + self._running_here()
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
            lent = [entry for entry in self._running if entry.lent]
            waiting = self._all_waiting() + lent
            self._running = [entry for entry in self._running if not entry.lent]
            threads = list(self._threads)
            self._news.notify_all()
        atexit.unregister(self.close)
        for thread in threads:
            thread.condemn(_CLOSED)
        for entry in waiting:
            self._resolve(entry, BuildError(_CLOSED))
        until = time.monotonic() + _CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if threading.current_thread() is not self._supervisor:
            self._supervisor.join(max(0.0, until - time.monotonic()))

    # The desk of a build farm.

    def lend(self, may_have: Callable[[], bool], timeout_s: float) -> Entry | None:
        """Wait for the largest job that other machines may build; None when the time is over.

        Args:
            may_have: whether they may have one more; called under the lock.
        """

        def is_due() -> bool:
            return self.closed or (bool(self._lendable) and not self._paused and may_have())

        with self._news:
            if not self._news.wait_for(is_due, timeout_s) or self.closed:
                return None
            entry = self._pop(self._lendable)
            if entry is not None:
                entry.started, entry.lent = time.monotonic(), True
                self._running.append(entry)
                self._announce()
            return entry

    def take_back(self, entry: Entry) -> None:
        """Have a job built here that other machines have not built."""
        if not self.put_back(entry):
            self.finish(entry, CancelledBuildError())

    # The desk of the workers' threads.

    def take(self, thread: WorkerThread) -> Entry | None:
        """Wait for the largest job; None when this worker is to go: idle, condemned or closed."""
        until = time.monotonic() + self._idle_s
        with self._news:
            while True:
                left = until - time.monotonic()
                going = self.closed or thread.condemned
                entry = None if going or self._paused else self._pop(self._pending)
                if entry:
                    entry.started = time.monotonic()
                    self._running.append(entry)
                    self._announce()
                    return entry
                if going or left <= 0:
                    # Off the list under the same lock: a job that comes now gets a new worker.
                    self._remove(thread)
                    return None
                self._news.wait(left)

    def put_back(self, entry: Entry) -> bool:
        """Queue a job again whose worker was found dead before it got the job, once a job, or that
        was lent.
        """
        with self._news:
            if entry.returned or entry.cancelled or self.closed:
                return False
            entry.returned, entry.lent = not entry.lent, False
            self._running.remove(entry)
            heapq.heappush(self._pending, (-entry.job.cost, entry.number, entry))
            self._announce()
            return True

    def finish(self, entry: Entry, outcome: BuildResult | BuildError) -> None:
        """Count a job as done and end its Future, and all that wait if none can be built here."""
        given_up: list[Entry] = []
        if entry.cancelled and isinstance(outcome, BuildError):
            outcome = CancelledBuildError()
        with self._news:
            if entry not in self._running:
                return  # it was lent, and this builder has closed
            self._running.remove(entry)
            self._done += 1
            if isinstance(outcome, BuildResult):
                self._seconds.append(outcome.seconds)
            elif outcome.final:
                given_up = self._give_up(outcome)
            self._announce()
        self._resolve(entry, outcome)
        if isinstance(outcome, BuildError):
            self._fail(given_up, outcome)

    def ready(self, thread: WorkerThread) -> None:
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
                    given_up = self._give_up(failure)
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
            asked = (
                bool(self._pending) and not self._paused and not threads and self._start_deaths == 0
            )
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
        busy = bool(self._pending) and self._gate.is_busy()
        with self._news:
            room = WORKERS_WHILE_BUSY if busy else self._limit
            waiting = 0 if self._paused else len(self._pending)
            wanted = min(self._limit, waiting + self._running_here())
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
                spool=self._spool,
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

    def _fail(self, entries: list[Entry], failure: BuildError) -> None:
        for entry in entries:
            self._resolve(entry, _copy_failure(failure))

    # All but `_resolve` and `_running_here` are called under the lock.

    def _give_up(self, failure: BuildError) -> list[Entry]:
        """Take all jobs that wait out of the queue; they are to be failed without the lock."""
        if failure.final or self._given_up >= BELIEFS:
            self.verdict = BuildError(failure.reason, remedy=failure.remedy, final=True)
            self.verdict.__cause__ = failure.__cause__
        given_up = [entry for _, _, entry in self._pending]
        self._pending.clear()
        self._done += len(given_up)
        return given_up

    def _announce(self) -> None:
        self._changed = True
        self._news.notify_all()

    def _running_here(self) -> int:
        return sum(not entry.lent for entry in self._running)

    def _all_waiting(self) -> list[Entry]:
        """Take all jobs out of the queues."""
        waiting = [entry for _, _, entry in self._pending + self._lendable]
        self._pending.clear()
        self._lendable.clear()
        return waiting

    def _pop(self, queue: list[tuple[int, int, Entry]]) -> Entry | None:
        """Return the largest job that is still wanted, now no longer to be cancelled."""
        while queue:
            entry = heapq.heappop(queue)[2]
            if entry.future.running() or entry.future.set_running_or_notify_cancel():
                return entry
            self._done += 1  # cancelled while it waited
            self._forget(entry)
            self._announce()
        return None

    def _forget(self, entry: Entry) -> None:
        if self._entries.get(entry.job.key) is entry:
            del self._entries[entry.job.key]

    def _remove(self, thread: WorkerThread) -> None:
        if thread in self._threads:
            self._threads.remove(thread)

    def _resolve(self, entry: Entry, outcome: BuildResult | BuildError) -> None:
        """End a Future (its callbacks run now), then forget its key: no key is built twice."""
        if entry.future.running() or entry.future.set_running_or_notify_cancel():
            if isinstance(outcome, BuildResult):
                entry.future.set_result(outcome)
            else:
                entry.future.set_exception(outcome)
        with self._news:
            self._forget(entry)


def _copy_failure(failure: BuildError) -> BuildError:
    """Return an error of its own for each job: raising adds to an error's traceback."""
    copy = BuildError(failure.reason, remedy=failure.remedy, final=failure.final)
    copy.__cause__ = failure.__cause__
    return copy
