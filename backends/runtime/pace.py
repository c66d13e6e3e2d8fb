"""How long a sampler's steps take, by their size and by how they were made.

Times are the GPU's own, between two marks in its queue; nothing waits for them: what has not come
to its end is read when it is asked for again. Without a GPU they are the processor's.
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..cuda_graphs import driver
from ..host_api.options import run_sigmas

EAGER, EXACT, COMPILED = "eager", "exact", "compiled"
#: Calls of one size and form whose times are kept, and sizes.
KEPT_CALLS, KEPT_SIZES = 20, 32
#: Fewer calls say nothing: the first holds what is done once.
FEWEST_CALLS = 3


class Speed(NamedTuple):
    """What a step of the last size takes.

    Attributes:
        form: how it is made: eager, exact (the host's forward, replayed) or compiled.
        ms: milliseconds, of all calls of the model in it.
        eager_ms: what eager steps of that size took in this process; None without any.
    """

    form: str
    ms: float
    eager_ms: float | None


class Begun(NamedTuple):
    """A call that has begun: the sizes of its tensors, where they are, and when that was."""

    size: Hashable
    device: torch.device
    mark: Any


class _Open(NamedTuple):
    """A call whose end was not read yet."""

    size: Hashable
    form: str
    begin: Any
    end: Any


class Times:
    """The newest times of calls, by their size."""

    def __init__(self) -> None:
        """None is known."""
        self._of: dict[Hashable, deque[float]] = {}

    def add(self, size: Hashable, milliseconds: float) -> None:
        """Keep one more."""
        kept = self._of.pop(size, None) or deque(maxlen=KEPT_CALLS)
        self._of[size] = kept
        kept.append(milliseconds)
        if len(self._of) > KEPT_SIZES:
            del self._of[next(iter(self._of))]

    def of(self, size: Hashable) -> list[float]:
        """Return those of a size, none while they are too few."""
        times = list(self._of.get(size, ()))
        return times if len(times) >= FEWEST_CALLS else []


class Pace:
    """The times of one session's calls."""

    def __init__(self, eager: Times) -> None:
        """Args: where those of the host's own calls are kept, which other sessions of the same
        model have made, too.
        """
        self._lock = threading.Lock()  # a page asks while a prompt's thread goes on
        self._open: deque[_Open] = deque(maxlen=256)
        self._times = {EAGER: eager, EXACT: Times(), COMPILED: Times()}
        self._last: tuple[Hashable, str] | None = None
        #: The sigmas of the run, its calls until now, and those of each step of the last one.
        self._run: weakref.ref[torch.Tensor] | None = None
        self._steps = self._calls = 0
        self._calls_per_step = 1

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Begun | None:
        """Note that a call with these arguments begins; None where it is no sampler's step."""
        values = (*args, *kwargs.values())
        sigmas = run_sigmas(values)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if sigmas is None or not tensors:
            return None
        self._count(sigmas)
        device = tensors[0].device
        return Begun(tuple(tuple(tensor.shape) for tensor in tensors), device, _mark(device))

    def end(self, begun: Begun, form: str) -> None:
        """Note that it has ended, and how it was made."""
        end = _mark(begun.device)
        with self._lock:
            self._last = begun.size, form
            self._open.append(_Open(begun.size, form, begun.mark, end))
            self._read()

    def speed(self) -> Speed | None:
        """What a step of the size that came last takes, None while that is not known."""
        with self._lock:
            self._read()
            if self._last is None:
                return None
            size, form = self._last
            calls = self._per_step()
            times, eager = (self._times[made].of(size) for made in (form, EAGER))
        if not times:
            return None
        # The quickest: the first ones hold what is done once, and builds may have run beside them.
        eager_ms = min(eager) * calls if eager else None
        return Speed(form, statistics.median(times) * calls, eager_ms)

    def _count(self, sigmas: torch.Tensor) -> None:
        """A call of the run of these sigmas begins."""
        if self._run is None or self._run() is not sigmas:
            self._calls_per_step = self._per_step()
            self._run, self._calls = weakref.ref(sigmas), 0
            self._steps = len(sigmas) - 1
        self._calls += 1

    def _per_step(self) -> int:
        """Calls of the model in a step: prompts that do not fit together, or samplers that look
        twice.
        """
        if not 0 < self._steps <= self._calls:
            return self._calls_per_step
        return round(self._calls / self._steps)

    def _read(self) -> None:
        """Read the times of calls that have come to their end, in their order."""
        while self._open and _is_passed(self._open[0].end):
            call = self._open.popleft()
            self._times[call.form].add(call.size, _milliseconds(call.begin, call.end))


def _mark(device: torch.device) -> Any:
    return driver.mark(device) or time.perf_counter()


def _is_passed(mark: Any) -> bool:
    return isinstance(mark, float) or driver.is_passed(mark)


def _milliseconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return 1000.0 * float(end - begin)
    return 1000.0 * driver.seconds_between(begin, end)
