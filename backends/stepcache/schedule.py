"""Which steps of a sampler run are computed; the others are forecast.

Steps are numbered from 0 as the sampler makes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum

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
        speed: steps made for each one that is computed.
        first: how many at the beginning are.
    """
    return min(steps, max(round(steps / speed), first + LAST))


def forced(sigmas: Sequence[float], boundaries: Iterable[float]) -> frozenset[int]:
    """Return the steps before which something of a conditioning began or ended: what was kept is of
    another evaluation.

    Args:
        sigmas: of the run's steps.
        boundaries: sigmas at which something begins or ends, at either side of which a step is.
    """
    ends = set(boundaries)
    sides = [tuple((s > end, s < end) for end in ends) for s in sigmas]
    return frozenset(n for n in range(1, len(sides)) if sides[n] != sides[n - 1])


def spread(
    noise: Sequence[float], certain: Collection[int], number: int, schedule: Schedule
) -> frozenset[int]:
    """Return the certain steps, and more between them until there are so many.

    `even` is half way between evenly by number and evenly by how much of the latent is noise, which
    early steps change little and late ones much; of the first gap it is one step, for a line
    through two neighbours is not to be taken far.

    Args:
        noise: how much of each step's latent is noise, from 1 to 0.
        certain: steps that are computed in any case, the first and the last ones among them.
        number: how many steps are to be computed.
    """
    last = len(noise) - 1
    begin = next((n - 1 for n in range(len(noise)) if n not in certain), last)
    fall = noise[0] - noise[last]
    way = [float(n) for n in range(len(noise))]
    if schedule is Schedule.EVEN and fall > 0:
        way = [0.5 * n / last + 0.5 * (noise[0] - noise[n]) / fall for n in range(len(noise))]
    chosen = set(certain)
    if schedule is Schedule.EVEN:
        begin = min(begin + 2, last)
        chosen.add(begin)
    rest = number - len(chosen)
    for each in range(1, rest + 1):
        wanted = way[begin] + (way[last] - way[begin]) * each / (rest + 1)
        free = [n for n in range(len(noise)) if n not in chosen]
        chosen.add(min(free, key=lambda n: abs(way[n] - wanted)))
    return frozenset(chosen)
