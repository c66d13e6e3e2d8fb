"""What a cache did in its last run: evaluations by conditioning, and the time of each sort."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..device.gpu import is_passed, mark, seconds_between

FULL, SHALLOW, FORECAST = "full", "shallow", "forecast"
_ROLES = ("positive", "negative")


class Tally:
    """Counts the evaluations of one sampler run. Only a report waits for the GPU."""

    def __init__(self, sorts: tuple[str, str]) -> None:
        """Set up; nothing is counted yet.

        Args:
            sorts: of evaluations: the whole one, and the one that replaces it.
        """
        self._whole, self._other = sorts
        self._evaluations: Counter[tuple[Any, str]] = Counter()
        self._seconds: dict[str, list[Callable[[], float | None]]] = {sort: [] for sort in sorts}
        #: The most memory that features held.
        self.feature_bytes = 0

    def begin(self, sort: str, chunks: Sequence[Any], device: torch.device) -> Callable[[], None]:
        """Count one call of the UNet and begin to time it; the returned function ends that.

        Args:
            chunks: conditionings of its batch, by the host's id and the role's number.
        """
        for chunk in chunks:
            self._evaluations[chunk, sort] += 1
        ended = _stopwatch(device)
        return lambda: self._seconds[sort].append(ended())

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """For each conditioning its role and its evaluations by sort, in the order they came."""
        known = dict.fromkeys(chunk for chunk, _ in self._evaluations)
        return [
            {
                "role": _role(chunk),
                **{sort: self._evaluations[chunk, sort] for sort in (self._whole, self._other)},
            }
            for chunk in known
        ]

    @property
    def seconds_saved(self) -> float:
        """How much less the other calls took than as many whole ones, by both medians."""
        times = self._times()
        if not all(times.values()):
            return 0.0
        gain = statistics.median(times[self._whole]) - statistics.median(times[self._other])
        return max(0.0, gain) * len(times[self._other])

    @property
    def seconds_without(self) -> float:
        """What all calls would have taken as whole ones, by their median."""
        times = self._times()
        whole = times[self._whole]
        return statistics.median(whole) * sum(map(len, times.values())) if whole else 0.0

    def _times(self) -> dict[str, list[float]]:
        return {
            sort: [s for ended in found if (s := ended()) is not None]
            for sort, found in self._seconds.items()
        }


def _role(chunk: Any) -> str:
    _, side = chunk
    return _ROLES[side] if side in range(len(_ROLES)) else f"conditioning {side}"


def _stopwatch(device: torch.device) -> Callable[[], Callable[[], float | None]]:
    """Begin to measure; the returned function ends it, and returns one that reads the seconds."""
    begun = mark(device)
    if begun is None:
        begin = time.perf_counter()

        def end() -> Callable[[], float | None]:
            seconds = time.perf_counter() - begin
            return lambda: seconds

        return end

    def record() -> Callable[[], float | None]:
        done = mark(device)
        return lambda: seconds_between(begun, done) if is_passed(done) else None

    return record
