"""The jobs of a builder: each waits, is built, here or by another machine, and ends once."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..errors import BuildError, CancelledBuildError
from ..reasons import of
from .contract import BuildResult, Job
from .pacing import BuildProgress, estimate_fraction, estimate_seconds_left

CLOSED = of("compiling_ended")


@dataclass(eq=False)
class Entry:
    """A job and what becomes of it.

    Attributes:
        number: by which it is told apart in messages.
        future: of all who wait for it.
        started: when it was handed out.
        returned: whether it was taken back once.
        cancelled: whether the user wants it no more.
        lent: whether it is for other machines, or at one.
    """

    job: Job
    number: int
    future: Future[BuildResult] = field(default_factory=Future)
    started: float | None = None
    returned: bool = False
    cancelled: bool = False
    lent: bool = False


class Jobs:
    """A queue in which each key is once. Futures end in the threads of who builds, never under the
    lock.
    """

    def __init__(self) -> None:
        #: How many workers of other machines build for this one; None where it is asked alone.
        self.elsewhere: int | None = None
        #: Why nothing can be built while this process lives; read without the lock, too.
        self.verdict: BuildError | None = None
        #: Whether nothing is built any more; read without the lock, too.
        self.closed = False
        # All below is guarded by the lock of `_news`, which is notified of every change.
        self._news = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._waiting: list[Entry] = []
        self._running: list[Entry] = []
        self._seconds: deque[float] = deque(maxlen=32)
        self._number = 0
        self._done = 0
        self._total = 0
        self._changed = False
        self._paused = False

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
            # Nothing in a lesson tells whose host it is true for.
            lent = self.elsewhere is not None and "description" in job.task
            entry = Entry(job, self._number, lent=lent)
            refusal = BuildError(CLOSED) if self.closed else None if lent else self.verdict
            if refusal is None:
                if not (self._waiting or self._running):
                    self._done = self._total = 0
                self._entries[job.key] = entry
                self._waiting.append(entry)
                self._total += 1
                self._announce()
        if refusal is not None:
            self._fail([entry], refusal)
        return entry.future

    def is_building(self) -> bool:
        """Whether a job is being built on this machine; asked at each step, so no lock is taken."""
        return any(not entry.lent for entry in self._running)

    def pause(self, paused: bool) -> None:
        """Begin no build, or go on; those that run come to their end."""
        with self._news:
            self._paused = paused
            self._announce()

    def take(
        self, timeout_s: float, *, lent: bool, may_have: Callable[[], bool | None]
    ) -> Entry | None:
        """Wait for the largest job that waits; None when the time is over.

        Args:
            lent: whether for another machine.
            may_have: whether it may be handed out now, None for never; called under the lock.
        """
        until = time.monotonic() + timeout_s
        with self._news:
            while not self.closed and (may := may_have()) is not None:
                entry = self._next(lent) if may and not self._paused else None
                if entry is not None:
                    entry.started = time.monotonic()
                    self._running.append(entry)
                    self._announce()
                    return entry
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._news.wait(left)
        return None

    def put_back(self, entry: Entry) -> bool:
        """Queue a job again that nobody built: it was lent, or its worker was found dead before it
        got the job; then it is not put back twice.
        """
        with self._news:
            if entry.returned or entry.cancelled or self.closed:
                return False
            entry.returned, entry.lent = not entry.lent, False
            self._running.remove(entry)
            self._waiting.append(entry)
            self._announce()
            return True

    def finish(self, entry: Entry, outcome: BuildResult | BuildError) -> None:
        """Count a job as done and end its Future, and all that wait if none can be built here."""
        if entry.cancelled and isinstance(outcome, BuildError):
            outcome = CancelledBuildError()
        given_up: list[Entry] = []
        with self._news:
            if entry not in self._running:
                return  # it was lent, and this builder has closed
            self._running.remove(entry)
            self._done += 1
            if isinstance(outcome, BuildResult):
                self._seconds.append(outcome.seconds)
            elif outcome.final:
                given_up = self._give_up(outcome, final=True)
            self._announce()
        self._end(entry, outcome)
        if isinstance(outcome, BuildError):
            self._fail(given_up, outcome)

    def _progress(self, limit: int, alive: int) -> BuildProgress:
        """Where the current batch stands, with so many workers at most, and so many now."""
        now = time.monotonic()
        with self._news:
            done, total = self._done, self._total
            labels = [entry.job.label for entry in self._running]
            elapsed = [now - (entry.started or now) for entry in self._running]
            waiting, paused = len(self._waiting), self._paused
            measured = list(self._seconds)
        elsewhere = self.elsewhere or 0
        workers = min(max(1, limit + elsewhere), waiting + len(elapsed))
        left = estimate_seconds_left(measured, elapsed, waiting, workers)
        known = elapsed or (waiting and not paused)
        fraction = round(estimate_fraction(measured, elapsed, done, total), 3)
        alive += elsewhere
        return BuildProgress(done, total, labels, left if known else None, alive, paused, fraction)

    def _fail(self, entries: list[Entry], failure: BuildError) -> None:
        """End jobs by an error of its own for each: raising adds to an error's traceback."""
        for entry in entries:
            self._end(entry, _copy_failure(failure))

    def _end(self, entry: Entry, outcome: BuildResult | BuildError) -> None:
        """End a Future (its callbacks run now), then forget its key: no key is built twice."""
        if entry.future.running() or entry.future.set_running_or_notify_cancel():
            if isinstance(outcome, BuildResult):
                entry.future.set_result(outcome)
            else:
                entry.future.set_exception(outcome)
        with self._news:
            self._forget(entry)

    # All below are called under the lock.

    def _announce(self) -> None:
        self._changed = True
        self._news.notify_all()

    def _next(self, lent: bool) -> Entry | None:
        """Take the largest job that is still wanted, now no longer to be cancelled."""
        for entry in sorted(self._waiting, key=lambda each: (-each.job.cost, each.number)):
            if entry.lent is not lent:
                continue
            if entry.future.running() or entry.future.set_running_or_notify_cancel():
                self._waiting.remove(entry)
                return entry
            self._drop([entry])  # cancelled while it waited
            self._forget(entry)
        return None

    def _give_up(self, failure: BuildError, *, final: bool) -> list[Entry]:
        """Take all jobs that wait for this machine out of the queue, to be failed without the lock;
        and refuse later ones if it is final.
        """
        if final:
            self.verdict = _copy_failure(failure, final=True)
        given_up = [entry for entry in self._waiting if not entry.lent]
        self._drop(given_up)
        return given_up

    def _drop(self, entries: list[Entry]) -> None:
        """Take jobs out of the queue, as done."""
        self._waiting = [entry for entry in self._waiting if entry not in entries]
        self._done += len(entries)
        self._announce()

    def _forget(self, entry: Entry) -> None:
        if self._entries.get(entry.job.key) is entry:
            del self._entries[entry.job.key]


def _copy_failure(failure: BuildError, *, final: bool = False) -> BuildError:
    copy = BuildError(failure.reason, remedy=failure.remedy, final=final or failure.final)
    copy.__cause__ = failure.__cause__
    return copy
