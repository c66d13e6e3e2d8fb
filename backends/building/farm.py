"""A build farm: jobs go to the workers of a dask.distributed scheduler, and what the farm does not
build is built here.

What it offers is `contract.AnyBuilder`. One thread sends, takes and decides; dask's own threads
only tell it what came. Names of functions and plain data are sent, never code of ours. But messages
of dask are pickles, and a job has source text in it that a worker runs: whoever reaches the
scheduler runs programs on every machine of the farm, this one among them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pkgutil
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any

from distributed import Client
from toolz import compose

from ..compilers.registry import backend_named
from ..errors import BuildError, CancelledBuildError
from ..events import Event, Events
from ..reasons import Reason, of
from ..target import keys
from .contract import AnyBuilder, BuildResult, Job
from .farm_messages import BUILD, TOPIC, Answer, Ask, read
from .pacing import BuildProgress, estimate_fraction, estimate_seconds_left

logger = logging.getLogger(__name__)

#: How long a scheduler may take to answer at first, and again once it was lost.
PATIENCE_S = 10.0
#: How long jobs wait for a farm without a worker that may take them.
NOBODY_S = 30.0
_LOOK_S = 2.0
_RESULT_S = 60.0
_CLOSE_S = 5.0
_CLOSED = of("compiling_ended")


@dataclass(eq=False)
class _Asked:
    """A job, the Future of those who wait for it, and where it is: at the farm while `remote` is
    dask's word for it, here once `here`, else waiting to be sent.

    Attributes:
        sent: how often it was.
        began: when a worker of the farm began with it.
        only: the workers that it was sent to; None: any of them.
    """

    job: Job
    number: int
    future: Future[BuildResult] = field(default_factory=Future)
    remote: Any = None
    here: bool = False
    sent: int = 0
    ended: bool = False
    began: float | None = None
    only: set[str] | None = None

    @property
    def name(self) -> str:
        """What dask calls it; each time that it is sent it is another."""
        return f"warmgraph-{self.job.key[:16]}-{self.number}-{self.sent}"

    @property
    def device(self) -> str:
        return str(self.job.task["description"]["device"])


def connect(scheduler: str) -> Any:
    """Return a connection to a scheduler, with the certificates of dask's own configuration.

    Raises:
        OSError: it is not reached.
        ValueError: it is no address.
    """
    return Client(scheduler, name="warmgraph", timeout=PATIENCE_S, set_as_default=False)


class FarmBuilder:
    """Has graphs built by a farm's workers, by turns; this server's own builder does the rest."""

    def __init__(
        self,
        client: Any,
        local: AnyBuilder,
        *,
        hello: dict[str, Any],
        time_limit_s: Callable[[], float],
        events: Events | None = None,
        nobody_s: float = NOBODY_S,
    ) -> None:
        """Set the builder up.

        Args:
            client: dask's, connected to the scheduler; closed with this builder.
            local: builds what the farm does not; closed with this builder.
            hello: what of `Builder`'s counts on other machines, too.
            time_limit_s: seconds that a job may take, asked for each job.
            events: is told, in this builder's thread, of changes of the progress.
            nobody_s: seconds that jobs wait while no worker may take them.
        """
        self._client = client
        self._scheduler = str(client.scheduler.address)
        self._local = local
        self._hello = hello
        self._time_limit_s = time_limit_s
        self._events = events or Events()
        self._nobody_s = nobody_s
        self._owner = os.getpid()
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._asked: dict[str, _Asked] = {}
        self._seconds: deque[float] = deque(maxlen=32)
        self._number = 0
        self._done = 0
        self._total = 0
        self._paused = False
        self._closed = False
        # Of the thread alone.
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._workers: set[str] = set()
        self._unfit: set[tuple[str, str]] = set()
        self._looked = 0.0
        self._nobody_since: float | None = None
        self._said: set[str] = set()
        client.subscribe_topic(TOPIC, self._heard)
        self._thread = threading.Thread(target=self._run, name="warmgraph-farm", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def verdict(self) -> BuildError | None:
        """Why nothing can be built; with a farm that answers, nobody knows."""
        return None if self._is_connected() else self._local.verdict

    def submit(self, job: Job) -> Future[BuildResult]:
        """See `AnyBuilder.submit`."""
        with self._lock:
            known = self._asked.get(job.key)
            if known and not known.future.done():
                return known.future
            self._number += 1
            asked = _Asked(job, self._number)
            closed = self._closed
            if not closed:
                if not self._asked:
                    self._done = self._total = 0
                self._asked[job.key] = asked
                self._total += 1
        if closed:
            asked.future.set_exception(BuildError(_CLOSED))
        else:
            asked.future.add_done_callback(lambda _: self._let_go(asked))
            self._tasks.put(partial(self._place, asked))
        return asked.future

    def progress(self) -> BuildProgress:
        """See `AnyBuilder.progress`."""
        now, here = time.monotonic(), self._local.progress()
        with self._lock:
            entries = list(self._asked.values())
            done, total, paused = self._done, self._total, self._paused
            measured = list(self._seconds)
        begun = [each for each in entries if each.began is not None]
        elapsed = [now - (each.began or now) for each in begun] + [0.0] * len(here.running)
        pending = max(0, len(entries) - len(elapsed))
        workers = len(self._workers) + here.workers
        left = estimate_seconds_left(measured, elapsed, pending, max(1, workers))
        known = elapsed or (pending and not paused)
        fraction = round(estimate_fraction(measured, elapsed, done, total), 3)
        labels = [each.job.label for each in begun] + here.running
        return BuildProgress(
            done, total, labels, left if known else None, workers, paused, fraction
        )

    def is_building(self) -> bool:
        """Whether a build takes this machine's processors; one of the farm does not."""
        return self._local.is_building()

    def pause(self, paused: bool) -> None:
        """See `AnyBuilder.pause`."""
        with self._lock:
            self._paused = paused
        self._local.pause(paused)
        self._tasks.put(self._take_back_waiting if paused else self._place_all)

    def cancel(self) -> int:
        """See `AnyBuilder.cancel`."""
        with self._lock:
            entries = list(self._asked.values())
            self._paused = False
        number = sum(self._resolve(each, CancelledBuildError()) for each in entries)
        self._local.cancel()  # what it has is among them
        return number

    def close(self) -> None:
        """Fail what is left, and leave the farm; returns when that is done, or after 5 s."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closed = True
            mine = [each for each in self._asked.values() if not each.here]
        atexit.unregister(self.close)
        self._local.close()
        for each in mine:
            self._resolve(each, BuildError(_CLOSED))
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_LOOK_S if self._asked else None)
            except queue.Empty:
                task = self._look
            if task is None:
                break
            try:
                task()
            except Exception:
                logger.exception("The build farm's thread failed and goes on")
            self._events.publish(Event.BUILDS_CHANGED)
        with contextlib.suppress(Exception):
            self._client.close(timeout=_CLOSE_S)

    def _place(self, asked: _Asked) -> None:
        """Send a job to the farm, or have it built here."""
        if asked.ended or asked.here or asked.remote is not None or self._paused:
            return
        if "description" not in asked.job.task:  # a lesson is no graph: nothing tells where it fits
            self._build_here(asked)
            return
        try:
            self._send(asked)
        except Exception as error:
            self._build_here(asked, f"it takes no jobs ({error!r})")

    def _send(self, asked: _Asked) -> None:
        if not self._is_connected():
            self._build_here(asked, "its scheduler is gone")
            return
        self._look_at_workers(_LOOK_S)
        asked.only = self._fit(asked)
        if asked.only is not None and not asked.only:
            self._look_at_workers(0.0)  # one may have come
            asked.only = self._fit(asked)
        if asked.only is not None and not asked.only:
            self._build_here(asked, "none of its workers builds for this server")
            return
        asked.sent += 1
        task = dict(asked.job.task)
        task.pop("dump", None)  # a folder of this machine
        ask: Ask = {
            "name": asked.name,
            "key": asked.job.key,
            "label": asked.job.label,
            "cost": asked.job.cost,
            "task": task,
            "target": keys.target(asked.device, backend_named(task["backend"])),
            "hello": self._hello,
            "limit_s": self._time_limit_s(),
        }
        # Whoever unpickles it needs the standard library and toolz alone, the scheduler, too; the
        # worker finds the function by its name.
        asked.remote = self._client.submit(
            compose(methodcaller("__call__", ask), pkgutil.resolve_name),
            BUILD,
            key=asked.name,
            workers=None if asked.only is None else sorted(asked.only),
            priority=asked.job.cost,
            pure=False,
        )
        asked.remote.add_done_callback(
            lambda remote: self._tasks.put(partial(self._arrived, asked, remote))
        )

    def _fit(self, asked: _Asked) -> set[str] | None:
        """The workers that may take a job; None: all of them."""
        unfit = {worker for worker, device in self._unfit if device == asked.device}
        return self._workers - unfit if unfit & self._workers else None

    def _arrived(self, asked: _Asked, remote: Any) -> None:
        """Take what the farm has made of a job; nothing is taken that is not wanted any more."""
        if asked.remote is not remote:
            return
        asked.remote, asked.began = None, None
        if asked.ended:
            return
        try:
            if remote.cancelled():
                self._build_here(asked, "its scheduler is gone")
                return
            if remote.status == "error":
                raise remote.exception(timeout=_RESULT_S)
            answer = read(remote.result(timeout=_RESULT_S))
        except Exception as error:
            self._build_here(asked, f"it could not build {asked.job.label} ({error!r})")
            return
        finally:
            remote.release()
        self._take(asked, answer)

    def _take(self, asked: _Asked, answer: Answer) -> None:
        if isinstance(answer.outcome, BuildError) and answer.unfit:
            self._unfit.add((answer.worker, asked.device))
            self._say(f"{answer.worker} builds nothing for this server: {answer.outcome.reason}")
            self._place(asked)
        elif not isinstance(answer.outcome, BuildError):
            self._resolve(asked, BuildResult(asked.job.key, *answer.outcome))
        elif answer.outcome.reason.key == "worker_died":  # for want of memory there, perhaps
            self._build_here(asked, answer.outcome.reason)
        else:
            self._resolve(asked, answer.outcome)

    def _build_here(self, asked: _Asked, why: str = "") -> None:
        asked.here = True
        if not self._is_wanted(asked):
            return
        if why:
            self._say(f"what it was asked for is built here: {why}")

        def arrived(done: Future[BuildResult]) -> None:
            error = CancelledBuildError() if done.cancelled() else done.exception()
            if error is None:
                self._resolve(asked, done.result())
            else:
                failed = error if isinstance(error, BuildError) else BuildError(_words(error))
                self._resolve(asked, failed)

        future = self._local.submit(asked.job)
        future.add_done_callback(arrived)
        if not self._is_wanted(asked):  # cancelled meanwhile
            future.cancel()

    def _look(self) -> None:
        """See who is there, and take back what nobody of the farm may build."""
        waiting = self._at_farm(begun=False)
        if not self._is_connected():
            return  # what was lost has been said to be
        self._look_at_workers(_LOOK_S)
        stuck = [
            e for e in waiting if not (self._workers if e.only is None else e.only & self._workers)
        ]
        if not stuck:
            self._nobody_since = None
            return
        now = time.monotonic()
        self._nobody_since = self._nobody_since or now
        for asked in stuck:
            if asked.only is not None:  # those that fitted have gone
                self._take_back(asked)
                self._place(asked)
            elif now - self._nobody_since >= self._nobody_s:
                self._take_back(asked)
                self._build_here(asked, "it has no workers")

    def _look_at_workers(self, age_s: float) -> None:
        """Ask who is there, unless that was asked so many seconds ago or less."""
        if time.monotonic() - self._looked < age_s and self._workers:
            return
        with contextlib.suppress(Exception):  # lost: each job is told of that by itself
            self._workers = set(self._client.nthreads())
            self._looked = time.monotonic()

    def _take_back_waiting(self) -> None:
        for asked in self._at_farm(begun=False):
            self._take_back(asked)

    def _take_back(self, asked: _Asked) -> None:
        """Have the farm forget a job; one that runs is killed."""
        remote, asked.remote, asked.began = asked.remote, None, None
        if remote is not None:
            with contextlib.suppress(Exception):  # lost: then it has forgotten it
                remote.cancel()

    def _place_all(self) -> None:
        with self._lock:
            entries = list(self._asked.values())
        for asked in sorted(entries, key=lambda each: -each.job.cost):
            self._place(asked)

    def _at_farm(self, *, begun: bool) -> list[_Asked]:
        with self._lock:
            entries = list(self._asked.values())
        return [e for e in entries if e.remote is not None and (e.began is not None) is begun]

    def _say(self, what: str) -> None:
        """Tell the log something of the farm, once."""
        if what not in self._said:
            self._said.add(what)
            logger.warning("Build farm %s: %s", self._scheduler, what)

    # --- other threads' calls ---------------------------------------------------------------------

    def _heard(self, event: tuple[float, dict[str, str]]) -> None:
        """A worker has begun with a job; called in dask's thread."""
        name = event[1].get("name")
        with self._lock:
            asked = next((each for each in self._asked.values() if each.name == name), None)
            if asked is None or asked.ended or asked.remote is None:
                return
            asked.began = time.monotonic()
            if not asked.future.running():
                asked.future.set_running_or_notify_cancel()
        self._tasks.put(_nothing)

    def _let_go(self, asked: _Asked) -> None:
        """A Future has ended; where that was by its owner's wish, the farm is told."""
        if asked.future.cancelled():
            self._end(asked)

    def _resolve(self, asked: _Asked, outcome: BuildResult | BuildError) -> bool:
        """End a job; False where it has ended before."""
        if not self._end(asked):
            return False
        if isinstance(outcome, BuildResult):
            with self._lock:
                self._seconds.append(outcome.seconds)
        if isinstance(outcome, CancelledBuildError) and asked.future.cancel():
            asked.future.set_running_or_notify_cancel()
        elif asked.future.running() or asked.future.set_running_or_notify_cancel():
            if isinstance(outcome, BuildResult):
                asked.future.set_result(outcome)
            else:
                asked.future.set_exception(outcome)
        with self._lock:
            self._forget(asked)
        return True

    def _end(self, asked: _Asked) -> bool:
        """Claim a job's end, which one caller does."""
        with self._lock:
            if asked.ended:
                return False
            asked.ended = True
            self._done += 1
            if asked.future.cancelled():
                self._forget(asked)
        self._tasks.put(partial(self._take_back, asked))
        return True

    def _is_wanted(self, asked: _Asked) -> bool:
        with self._lock:
            return not asked.ended

    def _forget(self, asked: _Asked) -> None:
        if self._asked.get(asked.job.key) is asked:
            del self._asked[asked.job.key]

    def _is_connected(self) -> bool:
        return bool(self._client.status == "running")


def _nothing() -> None:
    """What the thread does only to tell those who listen."""


def _words(error: BaseException) -> Reason:
    return Reason.plain(str(error) or type(error).__name__)
