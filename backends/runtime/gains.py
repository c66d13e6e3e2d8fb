"""How many times faster steps are than the host's own, by size, as measured."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import NamedTuple

#: Sizes of a model that are remembered.
KEPT_SIZES = 32
#: The sizes of a call's tensors, its latent's first.
Size = tuple[tuple[int, ...], ...]

#: The factors from which on a step is called faster, or slower.
FASTER, SLOWER = 1.05, 0.95
#: A factor that moved by less is the same.
_NEWS = 0.03


class Gain(NamedTuple):
    """What a step gains.

    Attributes:
        factor: how many times faster it is than without us.
        size: of the images that this was measured at, in words.
    """

    factor: float
    size: str


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
