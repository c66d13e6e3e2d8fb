"""Which steps Step Cache computes, as a run's sigmas and the user's choice settle it."""

from __future__ import annotations

import pytest

from warmgraph_backends.stepcache.schedule import Schedule, count, forced, spread

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
