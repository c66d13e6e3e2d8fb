"""How long a sampler's steps take, by their size and by how they were made.

Times are the GPU's own, between two events in its queue. Nothing waits for them: an unfinished one
is read when the time is asked for again. Without a GPU they are the processor's.
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..device import gpu
from ..host_api.models import LatentScale
from ..host_api.options import conditionings, run_sigmas
from .gains import KEPT_SIZES, SLOWER, Gain, Gains, Size

EAGER, EXACT, COMPILED = "eager", "exact", "compiled"
#: Calls of one size and form whose times are kept, and sizes.
KEPT_CALLS = 20
#: Fewer calls are not meaningful: the first includes what is done once.
FEWEST_CALLS = 3
#: Runs in a row that were slower than without us until that is said.
SLOW_RUNS = 3


class Speed(NamedTuple):
    """What a step of the last size takes.

    Attributes:
        form: how it is made: eager, exact (the host's forward, replayed) or compiled.
        size: of the image, in words.
        ms: milliseconds of all calls of the model in it, by form: this form's, and eager's if it
            was measured, in this process or an earlier one.
    """

    form: str
    size: str
    ms: dict[str, float]


class TimedRun(NamedTuple):
    """A sampler's run that has ended.

    Attributes:
        size: of the image, in words.
        batch: images at once.
        steps: how many were made.
        form: how the last one was made.
        ms: milliseconds of a step in that form, None where that is not known.
        eager_ms: what eager ones of that size take, None where that is not known.
    """

    size: str
    batch: int
    steps: int
    form: str
    ms: float | None
    eager_ms: float | None


class Begun(NamedTuple):
    """A call that has begun: its tensors' sizes, their device, the time, and whether something ran
    beside it.
    """

    size: Size
    device: torch.device
    mark: Any
    disturbed: bool


class Times:
    """The newest times of calls, by their size."""

    def __init__(
        self,
        remembered: Mapping[Size, float] | None = None,
        gains: Mapping[Size, Gain] | None = None,
    ) -> None:
        """Set up; no call was timed in this process yet.

        Args:
            remembered: the quickest time of each size in an earlier process, where that is known.
            gains: what steps gained beside it.
        """
        self._of: dict[Size, deque[float]] = {}
        self._remembered = dict(remembered or {})
        #: What steps gain beside these.
        self.gains = Gains(gains)

    def add(self, size: Size, milliseconds: float) -> None:
        """Keep one more."""
        kept = self._of.pop(size, None) or deque(maxlen=KEPT_CALLS)
        self._of[size] = kept
        kept.append(milliseconds)
        if len(self._of) > KEPT_SIZES:
            del self._of[next(iter(self._of))]

    def typical(self, size: Size) -> float | None:
        """Return the median of a size's, None while they are too few."""
        times = self._measured(size)
        return statistics.median(times) if times else None

    def quickest(self, size: Size) -> float | None:
        """Return the quickest of a size's, of an earlier process while those of this one are too
        few.
        """
        times = self._measured(size)
        return min(times) if times else self._remembered.get(size)

    def all_quickest(self) -> dict[Size, float]:
        """Return the quickest time of each size: those of earlier processes, then this one's."""
        found = dict(self._remembered)
        for size in list(self._of):
            found.pop(size, None)
            if (quickest := self.quickest(size)) is not None:
                found[size] = quickest
        return found

    def _measured(self, size: Size) -> list[float]:
        times = list(self._of.get(size, ()))
        return times if len(times) >= FEWEST_CALLS else []


class _Open(NamedTuple):
    """A call whose end was not read yet."""

    size: Size
    times: Times
    begin: Any
    end: Any


class Pace:
    """The times of one session's calls."""

    def __init__(
        self,
        eager: Times,
        scale: LatentScale | None = None,
        is_disturbed: Callable[[], bool] = lambda: False,
    ) -> None:
        """Set up; no call was timed.

        Args:
            eager: the times of the host's own calls, shared with other sessions of the same model.
            scale: how latents are to images.
            is_disturbed: whether something runs beside a step that makes it slower. An eager time
                of such a step is shown, but nothing is compared with it.
        """
        self._lock = threading.Lock()  # a page asks while a prompt's thread goes on
        self._scale = scale or LatentScale()
        self._open: deque[_Open] = deque(maxlen=256)
        self._times = {EAGER: eager, EXACT: Times(), COMPILED: Times()}
        self._is_disturbed = is_disturbed
        self._disturbed = Times()
        self._last: tuple[Size, str] | None = None
        #: How much of the model graphs served in the last call.
        self._served = 0
        #: Whether something ran beside a call of this run, and the runs in a row of one size that
        #: were slower than without us.
        self._run_disturbed = False
        self._slow: tuple[Size, int] | None = None
        #: The sigmas of the run, its calls until now, and those of each step of the last one.
        self._run: weakref.ref[torch.Tensor] | None = None
        self._steps = self._calls = 0
        self._calls_per_step = 1
        #: Images at once, and whether this run was asked for.
        self._batch = 1
        self._is_taken = True

    def fresh(self) -> Pace:
        """Return one for a copy of the model, which may be on another sort of card."""
        return Pace(Times(), self._scale, self._is_disturbed)

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Begun | None:
        """Note that a call with these arguments begins; None if it is not a sampler's step."""
        values = (*args, *kwargs.values())
        sigmas = run_sigmas(values)
        tensors = list(_tensors(values))
        if sigmas is None or not tensors:
            return None
        self._count(sigmas)
        size = tuple(tuple(tensor.shape) for tensor in tensors)
        self._batch = max(1, size[0][0] // conditionings(values)) if size[0] else 1
        device = tensors[0].device
        return Begun(size, device, _mark(device), self._is_disturbed())

    def end(self, begun: Begun, form: str, served: int = 0) -> None:
        """Note that it has ended, and how it was made.

        Args:
            served: the share of the model that graphs serve: a time with fewer does not count for a
                step with all.
        """
        end = _mark(begun.device)
        disturbed = begun.disturbed or self._is_disturbed()
        with self._lock:
            if served != self._served:
                self._served, self._times[COMPILED] = served, Times()
            times = self._disturbed if form == EAGER and disturbed else self._times[form]
            self._run_disturbed |= disturbed
            self._last = begun.size, form
            self._is_taken = False
            self._open.append(_Open(begun.size, times, begun.mark, end))
            self._read()

    def speed(self) -> Speed | None:
        """The time of a step of the latest size; None while it is not known."""
        with self._lock:
            self._read()
            if self._last is None:
                return None
            (size, form), calls = self._last, self._per_step()
            # Eager's quickest: the first ones hold what is done once, and builds may have run
            # beside them.
            known = {
                made: times.quickest(size) if made == EAGER != form else times.typical(size)
                for made, times in self._times.items()
            }
            if form == EAGER and known[EAGER] is None:
                known[EAGER] = self._disturbed.typical(size)
        ms = {made: calls * time for made, time in known.items() if time is not None}
        return Speed(form, self._scale.size(size[0]), ms) if form in ms else None

    def gain(self) -> Gain | None:
        """Return the gain of a step of the latest size: as measured, else that of the nearest
        measured size; None without any, or if the last step was the host's own.
        """
        speed = self.speed()
        if self._last is None or self._last[1] == EAGER:
            return None
        if speed is not None and EAGER in speed.ms:
            return Gain(speed.ms[EAGER] / speed.ms[speed.form], speed.size)
        return self._times[EAGER].gains.nearest(self._last[0])

    @property
    def is_slower(self) -> bool:
        """Whether the last runs were slower than without us."""
        return self._slow is not None and self._slow[1] >= SLOW_RUNS

    def take_run(self) -> TimedRun | None:
        """Return the run that has ended, once; None if none has ended since."""
        with self._lock:
            if self._last is None or self._is_taken:
                return None
            self._is_taken = True
            (size, _), calls = self._last, self._per_step()
            steps = min(self._steps, max(1, round(self._calls / calls)))
            form, eager = self._last[1], self._times[EAGER].quickest(size)
        speed = self.speed()
        run = TimedRun(
            self._scale.size(size[0]),
            self._batch,
            steps,
            form,
            None if speed is None else speed.ms[form],
            None if eager is None else calls * eager,
        )
        if not self._run_disturbed:
            self._compare(size, run)
        return run

    def _compare(self, size: Size, run: TimedRun) -> None:
        """Keep a run's gain, and whether it was another slower one."""
        if run.form == EAGER or run.ms is None or run.eager_ms is None:
            self._slow = None
            return
        factor = run.eager_ms / run.ms
        images = f"{run.batch} x {run.size}" if run.batch > 1 else run.size
        self._times[EAGER].gains.note(size, Gain(round(factor, 3), images))
        before = self._slow[1] if self._slow is not None and self._slow[0] == size else 0
        self._slow = (size, before + 1) if factor < SLOWER else None

    def _count(self, sigmas: torch.Tensor) -> None:
        """A call of the run of these sigmas begins."""
        if self._run is None or self._run() is not sigmas:
            self._calls_per_step = self._per_step()
            self._run, self._calls = weakref.ref(sigmas), 0
            self._run_disturbed = False
            self._steps = len(sigmas) - 1
        self._calls += 1

    def _per_step(self) -> int:
        """Calls of the model in a step: several for prompts that cannot share a batch, or samplers
        that evaluate twice.
        """
        if not 0 < self._steps <= self._calls:
            return self._calls_per_step
        return round(self._calls / self._steps)

    def _read(self) -> None:
        """Read the times of calls that have come to their end, in their order."""
        while self._open and _is_passed(self._open[0].end):
            call = self._open.popleft()
            call.times.add(call.size, _milliseconds(call.begin, call.end))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among a call's arguments, also where several are given as one (sound and video,
    references), in their order; a latent's comes first.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _mark(device: torch.device) -> Any:
    return gpu.mark(device) or time.perf_counter()


def _is_passed(mark: Any) -> bool:
    return isinstance(mark, float) or gpu.is_passed(mark)


def _milliseconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return 1000.0 * float(end - begin)
    return 1000.0 * gpu.seconds_between(begin, end)
