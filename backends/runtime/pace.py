"""How long a sampler's steps take, by their size and by how they were made.

Times are the GPU's own, between two events in its queue. Nothing waits for them: an unfinished one
is read when the time is asked for again. Without a GPU they are the processor's.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..device import gpu
from ..host_api.models import LatentScale
from ..host_api.options import conditionings, evaluation_sigmas, run_sigmas
from .gains import KEPT_SIZES, Figure, Gain, Gains, Size, Verdict, gain_of

EAGER, EXACT, COMPILED = "eager", "exact", "compiled"
#: Calls of a run's end whose times are kept.
KEPT_CALLS = 200
#: Fewer calls are not meaningful.
FEWEST_CALLS = 3
#: Sizes of a tensor that is an image's or a video's; a text's has fewer.
_IMAGE_DIMS = 4


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
        noise: of that, in milliseconds.
        busy: whether something ran beside its steps: they are compared with nothing.
        eager_ms: what eager ones of that size take, None where that is not known.
    """

    size: str
    batch: int
    steps: int
    form: str
    ms: float | None
    noise: float | None
    busy: bool
    eager_ms: float | None


class Begun(NamedTuple):
    """A call that has begun: its images' sizes, their device, the time, whether something ran
    beside it, and whether it counts: a run's first one of a size may hold what is done once.
    """

    size: Size
    device: torch.device
    mark: Any
    disturbed: bool
    counts: bool


class _Calls:
    """The times of one size's calls in a run, and what they took before it."""

    def __init__(self, before: Figure | None) -> None:
        self.before = before
        self.run: object = None
        self.ms: deque[float] = deque(maxlen=KEPT_CALLS)

    def figure(self) -> Figure | None:
        """Of this run, of what was before while its calls are too few."""
        return Figure.of(self.ms) if len(self.ms) >= FEWEST_CALLS else self.before


class Times:
    """What calls took in the newest run of their size."""

    def __init__(
        self,
        remembered: Mapping[Size, Figure] | None = None,
        gains: Mapping[Size, Gain] | None = None,
    ) -> None:
        """Set up; no call was timed in this process yet.

        Args:
            remembered: the figure of each size in an earlier process, where that is known.
            gains: what steps gained beside it.
        """
        self._of = {size: _Calls(figure) for size, figure in (remembered or {}).items()}
        #: What steps gain beside these.
        self.gains = Gains(gains)

    def add(self, size: Size, milliseconds: float, run: object) -> None:
        """Keep one more; runs of too few calls are taken together.

        Args:
            run: what tells a sampler's run from others.
        """
        kept = self._of.pop(size, None) or _Calls(None)
        if kept.run is not run and len(kept.ms) >= FEWEST_CALLS:
            kept = _Calls(kept.figure())
        kept.run = run
        kept.ms.append(milliseconds)
        self._of[size] = kept
        if len(self._of) > KEPT_SIZES:
            del self._of[next(iter(self._of))]

    def figure(self, size: Size) -> Figure | None:
        """Return what a call of a size takes; None if that is not known."""
        kept = self._of.get(size)
        return None if kept is None else kept.figure()

    def figure_of(self, run: object, size: Size) -> Figure | None:
        """Return what a call of a size took in a run; None if it was too short, or another came."""
        kept = self._of.get(size)
        is_its = kept is not None and kept.run is run and len(kept.ms) >= FEWEST_CALLS
        return self.figure(size) if is_its else None

    def all(self) -> dict[Size, Figure]:
        """Return the figure of each size: those of earlier processes, then this one's."""
        found = ((size, kept.figure()) for size, kept in list(self._of.items()))
        return {size: figure for size, figure in found if figure is not None}


class _Open(NamedTuple):
    """A call whose end was not read yet."""

    size: Size
    times: Times
    run: object
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
            is_disturbed: whether something runs beside a step that makes it slower. The time of
                such a step is shown, but compared with nothing.
        """
        self._lock = threading.Lock()  # a page asks while a prompt's thread goes on
        self._scale = scale or LatentScale()
        self._open: deque[_Open] = deque(maxlen=256)
        self._times = {EAGER: eager, EXACT: Times(), COMPILED: Times()}
        self._is_disturbed = is_disturbed
        self._disturbed = {form: Times() for form in self._times}
        self._last: tuple[Size, str] | None = None
        #: How much of the model graphs served in the last call.
        self._served = 0
        #: The sigmas of the run and of its evaluation, what tells it from others, and the sizes of
        #: its calls.
        self._run: weakref.ref[torch.Tensor] | None = None
        self._evaluation: weakref.ref[torch.Tensor] | None = None
        self._token = object()
        self._came: set[Size] = set()
        #: Its steps, and how many evaluations and calls there were until now; of the run before,
        #: evaluations in a step and calls in an evaluation.
        self._steps = self._evaluations = self._calls = 0
        self._rates = 1, 1
        #: Images at once, and whether this run was asked for.
        self._batch = 1
        self._is_taken = True
        self._counts_all = False

    def fresh(self) -> Pace:
        """Return one for a copy of the model, which may be on another sort of card."""
        pace = Pace(Times(), self._scale, self._is_disturbed)
        pace._counts_all = True  # each of its calls has its own copy of the run's sigmas
        return pace

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Begun | None:
        """Note that a call with these arguments begins; None if it is not a sampler's step."""
        values = (*args, *kwargs.values())
        sigmas = run_sigmas(values)
        images = list(_images(values))
        if sigmas is None or not images:
            return None
        self._count(sigmas, evaluation_sigmas(values))
        size = tuple(tuple(image.shape) for image in images)
        self._batch = max(1, size[0][0] // conditionings(values)) if size[0] else 1
        device = images[0].device
        counts = self._counts_all or self._steps == 1 or size in self._came
        self._came.add(size)
        return Begun(size, device, _mark(device), self._is_disturbed(), counts)

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
                self._disturbed[COMPILED] = Times()
            self._last = begun.size, form
            self._is_taken = False
            if begun.counts:
                times = (self._disturbed if disturbed else self._times)[form]
                self._open.append(_Open(begun.size, times, self._token, begun.mark, end))
            self._read()

    def speed(self) -> Speed | None:
        """The time of a step of the latest size; None while it is not known."""
        with self._lock:
            self._read()
            if self._last is None:
                return None
            (size, form), calls = self._last, self._per_step()
            known = {made: times.figure(size) for made, times in self._times.items()}
            known[form] = known[form] or self._disturbed[form].figure(size)
        ms = {made: calls * figure.ms for made, figure in known.items() if figure is not None}
        return Speed(form, self._scale.size(size[0]), ms) if form in ms else None

    def gain(self) -> Gain | None:
        """Return the gain of a step of the latest size: as measured, else that of the nearest
        measured size, if that is one; None without any, or if the last step was the host's own.
        """
        with self._lock:
            self._read()
            if self._last is None or self._last[1] == EAGER:
                return None
            size, form = self._last
            ours, eager = (self._times[made].figure(size) for made in (form, EAGER))
        if ours is not None and eager is not None:
            return gain_of(ours, eager, self._scale.size(size[0]))
        nearest = self._times[EAGER].gains.nearest(size)
        return nearest if nearest is not None and nearest.verdict is Verdict.FASTER else None

    def take_run(self) -> TimedRun | None:
        """Return the run that has ended, once; None if none has ended since."""
        with self._lock:
            if self._last is None or self._is_taken:
                return None
            self._is_taken = True
            self._read()
            (size, form), calls = self._last, self._per_step()
            steps = min(self._steps, max(1, round(self._calls / calls)))
            ours = self._times[form].figure_of(self._token, size)
            shown = ours or self._disturbed[form].figure_of(self._token, size)
            eager = self._times[EAGER].figure(size)
        words = self._scale.size(size[0])
        if form != EAGER and ours is not None and eager is not None:
            images = f"{self._batch} x {words}" if self._batch > 1 else words
            self._times[EAGER].gains.note(size, gain_of(ours, eager, images))
        return TimedRun(
            words,
            self._batch,
            steps,
            form,
            None if shown is None else calls * shown.ms,
            None if shown is None else calls * shown.noise,
            shown is not ours,
            None if eager is None else calls * eager.ms,
        )

    def _count(self, sigmas: torch.Tensor, evaluation: torch.Tensor | None) -> None:
        """A call of the run of these sigmas begins, in the evaluation of those."""
        if self._run is None or self._run() is not sigmas:
            self._rates = self._rates_now()
            self._run, self._token, self._came = weakref.ref(sigmas), object(), set()
            self._evaluations = self._calls = 0
            self._steps = len(sigmas) - 1
        known = None if self._evaluation is None else self._evaluation()
        if evaluation is None or known is not evaluation:
            self._evaluation = None if evaluation is None else weakref.ref(evaluation)
            self._evaluations += 1
        self._calls += 1

    def _per_step(self) -> int:
        """Calls of the model in a step."""
        evaluations, calls = self._rates_now()
        return evaluations * calls

    def _rates_now(self) -> tuple[int, int]:
        """Evaluations in a step, two for some samplers, and calls in one, several for prompts that
        cannot share a batch; of the run before, while this one does not tell. A run that skips
        steps has fewer evaluations than steps.
        """
        evaluations, calls = self._rates
        if 0 < self._steps <= self._evaluations:
            evaluations = round(self._evaluations / self._steps)
        if self._evaluations > 1:
            calls = round(self._calls / self._evaluations)
        return evaluations, calls

    def _read(self) -> None:
        """Read the times of calls that have come to their end, in their order."""
        while self._open and _is_passed(self._open[0].end):
            call = self._open.popleft()
            call.times.add(call.size, _milliseconds(call.begin, call.end), call.run)


def _images(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors of a call that have an image's size: its latent's, which comes first, and those
    of references. A text's length is none.
    """
    is_latent = True
    for value in values:
        tensors = list(_tensors((value,)))
        is_text = isinstance(value, torch.Tensor) and value.dim() < _IMAGE_DIMS
        if is_latent or not is_text:
            yield from tensors
        is_latent = is_latent and not tensors


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values, also where several are given as one (sound and video, references),
    in their order.
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
