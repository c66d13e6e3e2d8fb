"""Which steps of a run are full ones."""

from __future__ import annotations

import itertools

import pytest
import torch

from warmgraph_backends.caching.numbers import parse_steps
from warmgraph_backends.caching.run import in_range
from warmgraph_backends.deepcache.schedule import Drift, custom, quadratic, uniform

SIGMAS = [14.6, 9.0, 5.5, 3.3, 2.0, 1.2, 0.6, 0.2, 0.0]


def test_uniform_counts_from_the_first_step_of_its_part() -> None:
    assert uniform(range(0, 8), 3) == {0, 3, 6}
    assert uniform(range(2, 8), 3) == {2, 5}
    assert uniform(range(0, 8), 1) == set(range(8)), "interval 1 keeps nothing"
    assert uniform(range(0), 3) == set()


@pytest.mark.parametrize("total", [0, 1, 2, 4, 7, 20, 30, 50, 1000])
@pytest.mark.parametrize("interval", [1, 2, 3, 5, 10])
def test_quadratic_has_as_many_full_steps_as_uniform_and_begins_with_one(
    total: int, interval: int
) -> None:
    """So that an interval of one keeps nothing, however close together the steps are to be."""
    steps = range(3, 3 + total)
    for center in (0.0, 0.15, 0.3, 0.5, 1.0):
        for power in (1.0, 1.2, 1.4, 2.0, 4.0):
            chosen = quadratic(steps, interval, center=center, power=power)
            assert chosen <= set(steps) and chosen >= set(steps[:1])
            assert len(chosen) == len(uniform(steps, interval)), (center, power)


def test_quadratic_with_the_nodes_defaults() -> None:
    assert sorted(quadratic(range(20), 3, center=0.0, power=1.2)) == [0, 2, 4, 7, 10, 13, 17]


def test_quadratic_is_closest_around_its_centre() -> None:
    chosen = sorted(quadratic(range(100), 5, center=0.4, power=2.0))
    gaps = {a: b - a for a, b in itertools.pairwise(chosen)}
    near = [gap for step, gap in gaps.items() if 35 <= step <= 45]
    far = [gap for step, gap in gaps.items() if step < 15 or step > 70]
    assert max(near) < min(far)


def test_custom_takes_what_is_named_within_the_part() -> None:
    assert custom(range(0, 8), [0, 2, 5, 99]) == {0, 2, 5}
    assert custom(range(2, 8), [0, 5]) == {2, 5}, "the first step of the part is a full one"
    assert custom(range(0), [0]) == set()


def test_a_list_of_steps_is_read_or_refused_in_words() -> None:
    assert parse_steps("0,1, 2,\n5,9") == [0, 1, 2, 5, 9]
    assert parse_steps("9,0,9") == [0, 9]
    for text in ("", " , ", "1;2", "-1", "1.5", "one"):
        with pytest.raises(ValueError, match="full steps must be numbers from 0 on"):
            parse_steps(text)


def test_a_part_of_a_run_is_known_by_its_sigmas() -> None:
    assert in_range(SIGMAS, float("inf"), 0.0) == range(0, 8)
    assert in_range(SIGMAS, 9.0, 0.5) == range(1, 7)
    assert in_range(SIGMAS, 0.1, 0.0) == range(0)
    assert in_range(SIGMAS[3:], float("inf"), 0.5) == range(0, 4), "image to image begins later"


def _full(threshold: float, inputs: list[torch.Tensor]) -> list[bool]:
    drift = Drift(threshold)
    return [drift.is_full(step, x, None) for step, x in enumerate(inputs)]


def test_adaptive_is_full_once_the_input_is_far_from_the_last_full_one() -> None:
    inputs = [torch.full((2, 4, 8, 8), value) for value in (1.0, 1.05, 1.11, 1.15, 1.3, 1.3)]
    assert _full(0.1, inputs) == [True, False, True, False, True, False]
    assert _full(0.0, inputs) == [True] * 6, "at 0 every step is full"
    assert _full(1.0, inputs) == [True] + [False] * 5


def test_adaptive_decides_once_a_step_and_keeps_its_own_copy() -> None:
    drift, x = Drift(0.1), torch.ones(1, 4, 8, 8)
    assert drift.is_full(0, x, None)
    assert drift.is_full(0, x * 2, None) and not drift.is_full(1, x, None), "another chunk of it"
    assert not drift.is_full(1, x * 2, None)
    x *= 2  # the host's own tensor
    assert drift.is_full(2, x, None)


def test_adaptive_sees_the_latent_of_the_sampler() -> None:
    """The host scales a latent of size 1 and noise of sigma to size 1 for the UNet."""
    drift, x = Drift(0.4), torch.ones(2, 4, 8, 8)
    sigmas = (14.6, 11.0, 8.3, 6.5)  # of one size to the UNet, at every step
    found = [drift.is_full(n, x, torch.full((1,), sigma)) for n, sigma in enumerate(sigmas)]
    assert found == [True, False, True, False]


def test_adaptive_is_full_when_the_input_is_of_another_size_or_no_number() -> None:
    x = torch.ones(1, 4, 8, 8)
    assert _full(0.5, [x, x, x[:, :, :4], x * float("nan"), x]) == [True, False, True, True, True]
