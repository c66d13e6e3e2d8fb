"""Which steps Step Cache computes, as a run's sigmas and the user's choice settle it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import combinations

import pytest

from warmgraph_backends.stepcache.schedule import Schedule, count, forced, spread, within_reach

#: Shares of noise of 24 steps, as flow models with shift 3 have them.
FLOW = [3 * t / (1 + 2 * t) for t in (1 - n / 24 for n in range(24))]
LINEAR = [1 - n / 24 for n in range(24)]


def _certain(steps: int, first: int = 3) -> set[int]:
    return {*range(first), steps - 1}


@pytest.mark.parametrize(
    ("steps", "speed", "computed"), [(24, 2.0, 12), (24, 1.8, 13), (10, 4.0, 4), (12, 1.0, 12)]
)
def test_speed_is_steps_for_each_computed_one(steps: int, speed: float, computed: int) -> None:
    assert count(steps, speed, 3) == computed


def test_even_begins_with_a_gap_of_one_and_is_denser_where_noise_falls_fast() -> None:
    full = spread(FLOW, _certain(24), 12, Schedule.EVEN)
    assert sorted(full) == [0, 1, 2, 4, 7, 10, 13, 16, 18, 20, 22, 23]


def test_uniform_is_by_number_alone() -> None:
    full = spread(FLOW, _certain(24), 12, Schedule.UNIFORM)
    assert full == spread(LINEAR, _certain(24), 12, Schedule.UNIFORM)
    gaps = [b - a for a, b in zip(sorted(full)[2:], sorted(full)[3:], strict=False)]
    assert set(gaps) == {2, 3}


@pytest.mark.parametrize("schedule", [Schedule.EVEN, Schedule.UNIFORM])
@pytest.mark.parametrize("steps", [10, 11, 24, 50])
@pytest.mark.parametrize("speed", [1.1, 1.8, 4.0])
def test_what_is_certain_is_computed_and_no_step_twice(
    schedule: Schedule, steps: int, speed: float
) -> None:
    noise = [1 - n / steps for n in range(steps)]
    certain, number = {*_certain(steps), 7}, count(steps, speed, 3)
    full = spread(noise, certain, number, schedule)
    assert certain <= full <= set(range(steps))
    assert number <= len(full) <= max(number, len(certain) + 1)


def test_where_forecasts_begin_late_the_gap_is_behind_that() -> None:
    full = spread(LINEAR, {*range(10), 23}, 14, Schedule.EVEN)
    assert {10, 12} & full == set() and 11 in full


def test_all_certain_is_all() -> None:
    assert spread(LINEAR, range(24), 24, Schedule.EVEN) == frozenset(range(24))


def test_a_boundary_between_two_steps_makes_what_was_kept_another_evaluations() -> None:
    assert forced([1.0, 0.8, 0.6, 0.4], [0.7]) == {2}
    assert forced([1.0, 0.8, 0.6], [0.8]) == {1, 2}  # on a step: before it and after it
    assert forced([1.0, 0.8, 0.6], [5.0, 0.1]) == frozenset()


@pytest.mark.parametrize("noise", [FLOW, LINEAR])
@pytest.mark.parametrize("schedule", [Schedule.EVEN, Schedule.UNIFORM])
@pytest.mark.parametrize("speed", [1.5, 1.8, 2.0, 2.4, 3.0, 4.0])
@pytest.mark.parametrize("ends", [1, 2, 3])
def test_no_line_that_begins_within_a_run_is_taken_far(
    noise: list[float], schedule: Schedule, speed: float, ends: int
) -> None:
    """At 2 and less by little more than its last gap, for the same number of steps."""
    number = count(24, speed, 3)
    for anew in combinations(range(3, 23), ends):
        certain = {*_certain(24), *anew, *(n + 1 for n in anew)}
        full = within_reach(noise, spread(noise, certain, number, schedule), anew)
        assert certain <= full
        ways = list(_ways(noise, full, anew))
        assert max((far for step, far in ways if step >= anew[0]), default=0) <= 3.0
        if schedule is Schedule.EVEN and ends == 1 and speed <= 2.0:
            assert len(full) == number and max(far for _, far in ways) < 2.0


def _ways(
    noise: list[float], full: Collection[int], anew: Collection[int]
) -> Iterator[tuple[int, float]]:
    """Each forecast step, and how far its line is taken, in ways between the last two."""
    made: list[int] = []
    for step in range(len(noise)):
        made = [] if step in anew else made[-2:]
        if step in full:
            made.append(step)
        else:
            before, last = made
            yield step, (noise[last] - noise[step]) / (noise[before] - noise[last])


def test_without_a_boundary_nothing_is_added() -> None:
    full = frozenset({0, 1, 2, 12, 23})
    assert within_reach(LINEAR, full, ()) == full


def test_steps_between_two_boundaries_are_evenly_shared() -> None:
    """Not around the boundary alone, where steps lie that are computed in any case."""
    full = spread(LINEAR, {*_certain(24), 12, 13}, 12, Schedule.EVEN)
    assert sorted(full) == [0, 1, 2, 4, 7, 9, 12, 13, 15, 18, 20, 23]
