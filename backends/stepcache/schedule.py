"""Which steps of a sampler run are computed; the others are forecast.

Steps are numbered from 0 as the sampler makes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from itertools import pairwise

#: How much longer than the last one between two computed steps the way ahead may be.
FARTHEST = 3.0
#: The last step is always computed: what it gives is the image.
LAST = 1


class Schedule(str, Enum):
    """How the steps that are computed are spread."""

    EVEN = "even"
    UNIFORM = "uniform"
    CUSTOM = "custom"


def count(steps: int, speed: float, first: int) -> int:
    """Return how many of a run's steps are computed.

    Args:
        speed: steps per computed step.
        first: how many at the beginning are.
    """
    return min(steps, max(round(steps / speed), first + LAST))


def forced(sigmas: Sequence[float], boundaries: Iterable[float]) -> frozenset[int]:
    """Return the steps before which part of a conditioning began or ended, so that kept results are
    invalid.

    Args:
        sigmas: of the run's steps.
        boundaries: sigmas at which something begins or ends.
    """
    ends = set(boundaries)
    sides = [tuple((s > end, s < end) for end in ends) for s in sigmas]
    return frozenset(n for n in range(1, len(sides)) if sides[n] != sides[n - 1])


def spread(
    noise: Sequence[float], certain: Collection[int], number: int, schedule: Schedule
) -> frozenset[int]:
    """Return the certain steps, with more between them up to a number.

    `even` is half way between even by number and even by the latent's noise, which early steps
    change little and late ones much. Where forecasts begin after two neighbouring steps, it
    computes the second step after them, because a line through neighbours must not be extended far.
    Each further step goes into the widest remaining gap.

    Args:
        noise: how much of each step's latent is noise, from 1 to 0.
        certain: steps that are always computed, including the first and the last.
        number: how many steps to compute, if more than the certain ones.
    """
    last = len(noise) - 1
    fall = noise[0] - noise[last]
    way = [float(n) for n in range(len(noise))]
    if schedule is Schedule.EVEN and fall > 0:
        way = [0.5 * n / last + 0.5 * (noise[0] - noise[n]) / fall for n in range(len(noise))]
    chosen = set(certain)
    if schedule is Schedule.EVEN:
        chosen.update(_second_after(chosen, last))
    for begin, end, count in _shares(way, chosen, number - len(chosen)):
        for each in range(1, count + 1):
            wanted = way[begin] + (way[end] - way[begin]) * each / (count + 1)
            free = [n for n in range(begin + 1, end) if n not in chosen]
            chosen.add(min(free, key=lambda n: abs(way[n] - wanted)))
    return frozenset(chosen)


def within_reach(
    noise: Sequence[float], full: Collection[int], anew: Iterable[int]
) -> frozenset[int]:
    """Return the computed steps, and those that would otherwise be forecast from too far, where
    lines begin again within a run: there the last gap may be a single step.

    Args:
        noise: as of `spread`.
        full: the steps that are computed.
        anew: steps before which what was kept became another evaluation's.
    """
    chosen, begins = set(full), frozenset(anew)
    line: list[float] = []
    for step in range(min(begins, default=len(noise)), len(noise)):
        if step in begins:
            line = []
        if len(line) > 1 and step not in chosen:
            (before, last), now = line, noise[step]
            if now - last < FARTHEST * (last - before) < 0:
                chosen.add(step)
        if step in chosen:
            line = [*line, noise[step]][-2:]
    return frozenset(chosen)


def _second_after(certain: Collection[int], last: int) -> set[int]:
    """The second step after each two neighbours that are followed by a forecast."""
    ends = (n for n in certain if n < last and n - 1 in certain and n + 1 not in certain)
    return {min(n + 2, last) for n in ends}


def _shares(way: Sequence[float], chosen: Collection[int], rest: int) -> list[tuple[int, int, int]]:
    """How many more steps each gap between chosen ones gets: (begin, end, how many)."""
    gaps = [(a, b) for a, b in pairwise(sorted(chosen)) if b - a > 1]
    counts = dict.fromkeys(gaps, 0)
    for _ in range(rest):
        free = [(a, b) for a, b in gaps if counts[a, b] < b - a - 1]
        if not free:
            break
        counts[max(free, key=lambda gap: (way[gap[1]] - way[gap[0]]) / (counts[gap] + 1))] += 1
    return [(begin, end, count) for (begin, end), count in counts.items()]
