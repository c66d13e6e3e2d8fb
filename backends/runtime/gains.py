"""How many times faster steps are than the host's own: the one place that says so.

Both are of one kind: the median of a run's own calls, by one clock, without the first.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

#: Sizes of a model that are remembered.
KEPT_SIZES = 32
#: The sizes of a call's images, its latent's first.
Size = tuple[tuple[int, ...], ...]

#: A factor that is nearer to 1 is told as the same.
_LEAST = 0.05
#: Of a normal distribution, beside the median distance from its median.
_DEVIATION = 1.4826
#: A factor that moved by less is the same.
_NEWS = 0.03


class Figure(NamedTuple):
    """What a call of the model, or a step, took in a run.

    Attributes:
        ms: the median.
        noise: what the machine alone changes, in ms: the standard deviation by the median distance.
    """

    ms: float
    noise: float = 0.0

    @classmethod
    def of(cls, times: Iterable[float]) -> Figure:
        """Return the figure of some times in ms."""
        times = list(times)
        middle = statistics.median(times)
        return cls(middle, _DEVIATION * statistics.median(abs(each - middle) for each in times))


class Verdict(str, Enum):
    """What a step is beside the host's own."""

    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"


class Gain(NamedTuple):
    """What a step gains.

    Attributes:
        factor: how many times faster it is than without us.
        size: of the images that this was measured at, in words.
        noise: the factor's own, by what the machine alone changes.
    """

    factor: float
    size: str
    noise: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """What that is called: only a difference larger than the noise is one."""
        if abs(self.factor - 1) < max(_LEAST, self.noise):
            return Verdict.SAME
        return Verdict.FASTER if self.factor > 1 else Verdict.SLOWER


def gain_of(ours: Figure, eager: Figure, size: str) -> Gain:
    """Return what a step gains beside the host's own of the same size (in words)."""
    noise = (ours.noise + eager.noise) / ours.ms
    return Gain(round(eager.ms / ours.ms, 3), size, round(noise, 3))


class Gains:
    """The newest gain of each size of one model, those of earlier processes among them."""

    def __init__(self, remembered: Mapping[Size, Gain] | None = None) -> None:
        """Set up; nothing is measured in this process yet.

        Args:
            remembered: what earlier processes have measured.
        """
        self._lock = threading.Lock()
        self._of = dict(remembered or {})

    def note(self, size: Size, gain: Gain) -> None:
        """Keep what a size gains."""
        with self._lock:
            known = self._of.pop(size, gain)
            self._of[size] = known if abs(gain.factor / known.factor - 1) < _NEWS else gain
            while len(self._of) > KEPT_SIZES:
                del self._of[next(iter(self._of))]

    def nearest(self, size: Size) -> Gain | None:
        """Return the gain of the size that is nearest by its elements, the newest of equals; None
        where nothing was measured.
        """
        with self._lock:
            known = list(self._of.items())
        if not known:
            return None
        wanted = _elements(size)
        return min(reversed(known), key=lambda entry: abs(math.log(_elements(entry[0]) / wanted)))[
            1
        ]

    def all(self) -> dict[Size, Gain]:
        """Return all gains by size."""
        with self._lock:
            return dict(self._of)


def _elements(size: Size) -> int:
    """How many elements a call's latent has: pixels, frames and images at once."""
    return max(1, math.prod(size[0])) if size else 1
