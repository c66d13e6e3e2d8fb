"""When and how much to build: number of workers, seconds left, and who may measure on the GPU."""

from __future__ import annotations

import heapq
import logging
import os
import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

logger = logging.getLogger(__name__)

DEFAULT_WORKERS = 8
RAM_PER_WORKER = 2 << 30
VRAM_PER_WORKER = 1 << 29
# Even at the lowest priority a starting worker slows a prompt, which hangs on one thread of the
# server: 14 at once cost the first image a fifth.
WORKERS_WHILE_BUSY = 1
#: Of fewer, the one that a prompt leaves room for takes a part that its steps miss.
FEW_CORES = 4
#: What a job is taken to last before any has ended.
UNMEASURED_S = 40.0
_POLL_S = 0.2


class BuildProgress(NamedTuple):
    """Where the current batch stands: everything submitted since the queue was last empty.

    Attributes:
        running: labels of what is being built now.
        seconds_left: None where it is not known, or nothing is left.
        workers: processes that live now.
        paused: whether the user wants no build to begin.
        fraction: of all of them, from 0 to 1; what is being built counts in part.
    """

    done: int
    total: int
    running: list[str]
    seconds_left: float | None
    workers: int
    paused: bool
    fraction: float = 0.0


def worker_count(
    cores: int, setting: int, free_ram_bytes: int, free_vram_bytes: int | None = None
) -> int:
    """Return how many workers this machine has room for, at least 1.

    Args:
        cores: processor cores that the server may use; two stay free for it, of few cores fewer:
            workers have the lowest priority, and all but one start only while no prompt runs.
        setting: the user's upper bound; 0 is the default of 8.
        free_ram_bytes: 2 GiB of it for each worker.
        free_vram_bytes: what sampling does not need, 0.5 GiB of it for each worker; None where
            graphs are not built for a GPU.
    """
    free_cores = cores - min(2, cores // 4)
    counts = [free_cores, setting or DEFAULT_WORKERS, free_ram_bytes // RAM_PER_WORKER]
    if free_vram_bytes is not None:
        counts.append(free_vram_bytes // VRAM_PER_WORKER)
    return max(1, min(counts))


def slows_steps(device: str) -> bool:
    """Tell whether a build at the lowest priority makes a sampler's steps slower: where these need
    all cores, or there are few.

    Args:
        device: on which they run, as torch names its type.
    """
    return device == "cpu" or _cores() < FEW_CORES


def room_for_workers(setting: int, free_vram: int | None) -> int:
    """Return how many build workers this machine has room for now.

    Args:
        setting: the user's upper bound, 0 for automatic.
        free_vram: bytes of VRAM that sampling does not need, None without a GPU.
    """
    import psutil

    free_ram = psutil.virtual_memory().available
    return worker_count(_cores(), setting, free_ram, free_vram)


def _cores() -> int:
    """The processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def estimate_seconds_left(
    measured: Sequence[float], running: Sequence[float], pending: int, workers: int
) -> float | None:
    """Estimate when the last job ends, or None while nothing has been measured.

    Args:
        measured: seconds that finished jobs took; their median stands for every job.
        running: seconds since each running job began.
        pending: jobs that wait.
        workers: workers that share them.
    """
    if not measured:
        return None
    typical = statistics.median(measured)
    # A job past the typical time is expected to take a tenth more of what it has taken.
    busy = [max(typical - elapsed, elapsed / 10) for elapsed in running]
    free = busy + [0.0] * (max(1, workers) - len(busy))
    heapq.heapify(free)
    last = max(free)
    for _ in range(pending):
        end = heapq.heappop(free) + typical
        last = max(last, end)
        heapq.heappush(free, end)
    return last


def estimate_fraction(
    measured: Sequence[float], running: Sequence[float], done: int, total: int
) -> float:
    """Estimate how much of a batch is done, from 0 to 1.

    Args:
        measured, running: see `estimate_seconds_left`; before any was measured, `UNMEASURED_S`
            stands for every job.
        done: jobs that ended, of `total`.
    """
    typical = statistics.median(measured) if measured else UNMEASURED_S
    parts = sum(_share(elapsed, typical) for elapsed in running)
    return min(1.0, (done + parts) / total) if total else 0.0


def _share(elapsed: float, typical: float) -> float:
    """How much of a job is done: nine tenths in the typical time, then ever slower."""
    if elapsed < typical:
        return 0.9 * elapsed / typical
    return 1 - 0.1 * typical / elapsed


class MeasuringGate:
    """Lets workers measure kernels on the GPU: one at a time while a prompt samples, else all."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._changed = threading.Condition()
        self._measuring = 0
        self._waiting: deque[object] = deque()

    def acquire(self, give_up: Callable[[], bool]) -> bool:
        """Wait for permission, first come first served; False when `give_up()` became true."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
        try:
            while not give_up():
                busy = self.is_busy()
                with self._changed:
                    first = self._waiting[0] is ticket
                    if not busy or (first and self._measuring == 0):
                        self._measuring += 1
                        return True
                    self._changed.wait(_POLL_S)
            return False
        finally:
            with self._changed:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def release(self) -> None:
        """Give the permission back."""
        with self._changed:
            self._measuring -= 1
            self._changed.notify_all()

    def is_busy(self) -> bool:
        try:
            return self._is_busy()
        except Exception:
            logger.exception("Could not ask whether a prompt samples; measuring waits its turn")
            return True
