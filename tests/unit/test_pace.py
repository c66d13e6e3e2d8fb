"""How long steps take: by size and form, of the whole step, and never invented."""

from __future__ import annotations

import pytest
import torch

from warmgraph_backends.runtime import pace as room
from warmgraph_backends.runtime.pace import COMPILED, EAGER, EXACT, Pace, Speed, Times


class Clock:
    """The processor's clock, which a call moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(room.time, "perf_counter", lambda: self.now)

    def pass_by(self, milliseconds: float) -> None:
        self.now += milliseconds / 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def _run(
    pace: Pace,
    clock: Clock,
    form: str,
    times: list[float],
    *,
    side: int = 8,
    steps: int | None = None,
) -> None:
    """A sampler's run, a time for each call of the model."""
    options = {"sample_sigmas": torch.zeros((steps or len(times)) + 1)}
    for milliseconds in times:
        latent = torch.zeros(1, 4, side, side)
        begun = pace.begin((latent, torch.zeros(1)), {"transformer_options": options})
        assert begun is not None
        clock.pass_by(milliseconds)
        pace.end(begun, form)


def test_a_step_is_told_beside_the_models_own_eager_ones(clock: Clock) -> None:
    pace = Pace(Times())
    assert pace.speed() is None
    _run(pace, clock, EAGER, [500.0, 64.0])
    assert pace.speed() is None  # two calls say nothing: one held what is done once
    _run(pace, clock, EAGER, [61.0, 62.0])
    assert pace.speed() == pytest.approx(Speed(EAGER, 63.0, 61.0))
    _run(pace, clock, COMPILED, [90.0, 31.0, 30.0, 31.0])
    assert pace.speed() == pytest.approx(Speed(COMPILED, 31.0, 61.0))
    _run(pace, clock, EXACT, [40.0, 41.0, 42.0])
    assert pace.speed() == pytest.approx(Speed(EXACT, 41.0, 61.0))


def test_nothing_is_compared_with_another_size(clock: Clock) -> None:
    pace = Pace(Times())
    _run(pace, clock, EAGER, [61.0] * 3)
    _run(pace, clock, COMPILED, [120.0] * 3, side=16)
    assert pace.speed() == pytest.approx(Speed(COMPILED, 120.0, None))


def test_a_step_is_all_of_its_calls(clock: Clock) -> None:
    """Prompts of different lengths run one after the other; some samplers look twice."""
    pace = Pace(Times())
    _run(pace, clock, EAGER, [30.0] * 8, steps=4)
    assert pace.speed() == pytest.approx(Speed(EAGER, 60.0, 30.0 * 2))
    _run(pace, clock, COMPILED, [15.0] * 3, steps=4)  # still running
    assert pace.speed() == pytest.approx(Speed(COMPILED, 30.0, 60.0))


def test_sessions_of_one_model_share_its_eager_times(clock: Clock) -> None:
    shared = Times()
    _run(Pace(shared), clock, EAGER, [61.0] * 3)
    after = Pace(shared)
    _run(after, clock, COMPILED, [31.0] * 3)
    assert after.speed() == pytest.approx(Speed(COMPILED, 31.0, 61.0))


def test_calls_of_no_sampler_are_not_timed(clock: Clock) -> None:
    pace = Pace(Times())
    assert pace.begin((torch.zeros(1, 4),), {}) is None
    assert pace.begin(("no tensor",), {"o": {"sample_sigmas": None}}) is None
    assert pace.speed() is None


def test_a_call_that_failed_is_not_counted_as_one_that_ended(clock: Clock) -> None:
    pace = Pace(Times())
    for _ in range(5):
        assert pace.begin((torch.zeros(1),), {"o": {"sample_sigmas": torch.ones(3)}}) is not None
    assert pace.speed() is None


def test_few_sizes_are_remembered() -> None:
    times = Times()
    for size in range(room.KEPT_SIZES + 5):
        for _ in range(room.FEWEST_CALLS):
            times.add(size, 1.0)
    assert not times.of(4) and times.of(5) == [1.0] * room.FEWEST_CALLS
