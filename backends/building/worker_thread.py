"""One worker's life: a thread that starts a process, hands it jobs and takes the answers."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ..errors import BuildError
from ..reasons import NOTHING, Reason, of
from .answers import (
    AnswerError,
    Failure,
    Measure,
    Result,
    built_of,
    read_answer,
    read_greeting,
)
from .contract import BuildResult
from .jobs import Entry
from .messages import ProtocolError
from .pacing import MeasuringGate
from .worker_process import DeadWorkerError, Keeper, WorkerProcess

logger = logging.getLogger(__name__)

_LEAVE_S = 5.0


class Desk(Protocol):
    """What a worker's thread asks of its builder."""

    def hand_out(self, thread: WorkerThread) -> Entry | None: ...

    def put_back(self, entry: Entry) -> bool: ...

    def finish(self, entry: Entry, outcome: BuildResult | BuildError) -> None: ...

    def ready(self) -> None: ...

    def gone(self, thread: WorkerThread, failure: BuildError | None) -> None: ...


class WorkerThread:
    """Drives one worker process from a thread of its own, so that no worker can hold up another."""

    def __init__(
        self,
        desk: Desk,
        *,
        script: Path,
        hello: dict[str, Any],
        keeper: Keeper,
        gate: MeasuringGate,
        time_limit_s: Callable[[], float],
        start_limit_s: float,
    ) -> None:
        self.is_ready = False
        self._desk = desk
        self._script = script
        self._hello = hello
        self._keeper = keeper
        self._gate = gate
        self._time_limit_s = time_limit_s
        self._start_limit_s = start_limit_s
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._deadline: float | None = None
        self._overtime = NOTHING  # what to say when the deadline has passed
        self._sentence: Reason | None = None  # why this worker was killed by us
        self._thread = threading.Thread(target=self._live, name="warmgraph-worker", daemon=True)

    def start(self) -> None:
        """Start the thread, and in it the process."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end; at once for a thread that has not begun, or is the caller's own."""
        with contextlib.suppress(RuntimeError):
            self._thread.join(timeout_s)

    @property
    def condemned(self) -> bool:
        """Whether the worker was killed on purpose."""
        return bool(self._sentence)

    def condemn(self, reason: Reason) -> None:
        """Kill the worker; its job fails with this reason. Never blocks."""
        with self._lock:
            self._sentence = self._sentence or reason
            process = self._process
        if process:
            process.kill()

    def expire(self, now: float) -> None:
        """Kill the worker if what it does has taken too long. Never blocks."""
        with self._lock:
            if self._deadline is None or now < self._deadline:
                return
            self._deadline = None
            reason = self._overtime
        self.condemn(reason)

    def _set_deadline(self, seconds: float | None, overtime: Reason = NOTHING) -> None:
        with self._lock:
            self._deadline = None if seconds is None else time.monotonic() + seconds
            self._overtime = overtime

    def _live(self) -> None:
        failure: BuildError | None = None
        try:
            process = self._begin()
            self.is_ready = True
            self._desk.ready()
            while (entry := self._desk.hand_out(self)) is not None:
                if not process.alive() and self._desk.put_back(entry):
                    break
                if not self._build(process, entry):
                    break
        except DeadWorkerError as error:
            reason = self._sentence or of("worker_died_early", error=error)
            failure = _caused(BuildError(reason), error)
        except BuildError as error:
            failure = error
        except OSError as error:
            failure = _caused(BuildError(of("worker_no_start", error=error)), error)
        except Exception as error:
            logger.exception("A build worker's thread failed")
            failure = _caused(BuildError(of("worker_thread_failed", error=repr(error))), error)
        finally:
            with contextlib.suppress(OSError):
                self._end()
            self._desk.gone(self, None if self.is_ready else failure)

    def _begin(self) -> WorkerProcess:
        """Start the process and wait until it is ready for jobs."""
        process = WorkerProcess(
            self._script,
            keeper=self._keeper,
            cwd=self._hello.get("cwd"),
            threads=int(self._hello.get("threads", 1)),
        )
        with self._lock:
            self._process = process
            sentence = self._sentence
        if sentence:
            raise DeadWorkerError(sentence)
        limit = self._start_limit_s
        self._set_deadline(limit, of("worker_not_ready", limit=f"{limit:g}"))
        process.send({**self._hello, "cache": str(process.cache)})
        answer = process.receive()
        self._set_deadline(None)
        read_greeting(answer)
        logger.debug("Build worker %s ready after %s s", process.pid, answer.get("seconds"))
        return process

    def _end(self) -> None:
        process = self._process
        if process:
            process.end(grace_s=0.0 if self.condemned else _LEAVE_S)

    def _build(self, process: WorkerProcess, entry: Entry) -> bool:
        """Have one job done and end it whatever happens; False if the worker must not go on."""
        label = entry.job.label
        usable = False
        outcome: BuildResult | BuildError
        try:
            answer = self._converse(process, entry)
            if isinstance(answer, Failure):
                # What it leaves behind (a broken CUDA context, say) must not fail the next job too.
                outcome, usable = answer.error, answer.clean
            else:
                data = process.receive_bytes(answer.packed_bytes)
                outcome, usable = built_of(entry.job.key, answer, data), True
        except AnswerError as error:
            reason = of("no_answer", label=label, error=error)
            outcome = _caused(BuildError(reason), error)
        except ProtocolError as error:
            reason = of("not_sent", label=label, error=error)
            outcome = _caused(BuildError(reason), error)
            usable = True
        except DeadWorkerError as error:
            garbled = isinstance(error.__cause__, ProtocolError)  # stopped for that
            said = of("no_message", label=label, error=error.__cause__)
            died = of("worker_died", label=label, error=error)
            outcome = _caused(BuildError(self._sentence or (said if garbled else died)), error)
        except Exception as error:
            outcome = _caused(BuildError(of("no_build", label=label, error=repr(error))), error)
        self._set_deadline(None)
        self._desk.finish(entry, outcome)
        return usable

    def _converse(self, process: WorkerProcess, entry: Entry) -> Result | Failure:
        """Send one job and wait for its answer, letting the worker measure in between.

        Raises:
            AnswerError: the worker says something that is no answer to this job, or ends what it
                has not begun: who waited for it would wait for ever.
        """
        limit = self._time_limit_s()
        self._set_deadline(limit, of("too_slow", label=entry.job.label, limit=f"{limit:g}"))
        measuring = False
        try:
            process.send({"job": entry.number, "task": entry.job.task})
            while True:
                answer = read_answer(process.receive(), entry.number)
                if not isinstance(answer, Measure):
                    return answer
                if measuring is (answer is Measure.BEGIN):
                    raise AnswerError(f"measure {answer.value} comes out of turn")
                if measuring:
                    measuring = False
                    self._gate.release()
                else:
                    measuring = self._admit(process)
        finally:
            if measuring:
                self._gate.release()

    def _admit(self, process: WorkerProcess) -> bool:
        """Let the worker measure as soon as the gate does; its clock stands still meanwhile."""
        with self._lock:
            left = None if self._deadline is None else self._deadline - time.monotonic()
            self._deadline = None
        if not self._gate.acquire(lambda: self.condemned or not process.alive()):
            return False
        with self._lock:
            self._deadline = None if left is None else time.monotonic() + left
        try:
            process.send({"measure": "granted"})
        except DeadWorkerError:
            self._gate.release()
            raise
        return True


def _caused(outcome: BuildError, cause: BaseException) -> BuildError:
    """Give an error that is not raised here its cause, for the log."""
    outcome.__cause__ = cause
    return outcome
