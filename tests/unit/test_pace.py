"""How long steps take: by size and form, of the whole step, and never invented."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends.host_api.models import LatentScale
from warmgraph_backends.runtime import pace as room
from warmgraph_backends.runtime.pace import COMPILED, EAGER, EXACT, Pace, Speed, TimedRun, Times


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


def _ms(**times: float) -> Any:
    return pytest.approx(times)


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
    assert pace.speed() == Speed(EAGER, "64x64", _ms(eager=63.0))
    _run(pace, clock, COMPILED, [90.0, 31.0, 30.0, 31.0])
    assert pace.speed() == Speed(COMPILED, "64x64", _ms(eager=61.0, compiled=31.0))
    _run(pace, clock, EXACT, [40.0, 41.0, 42.0])
    every = _ms(eager=61.0, exact=41.0, compiled=31.0)
    assert pace.speed() == Speed(EXACT, "64x64", every)


def test_a_latent_of_several_tensors_is_of_their_sizes(clock: Clock) -> None:
    """Sound and video come as one; another length of either is another size."""
    pace = Pace(Times())

    def run(form: str, time: float, *, side: int = 8, length: int = 20, more: int = 0) -> None:
        options = {"sample_sigmas": torch.zeros(4)}
        for _ in range(3):
            latent = [torch.zeros(2, 4, side, 8), torch.zeros(2, 8, length)]
            named = {"context": torch.zeros(2, 5), "ref_latents": (torch.zeros(1, more),)}
            begun = pace.begin((latent, torch.zeros(2)), {"transformer_options": options, **named})
            assert begun is not None
            clock.pass_by(time)
            pace.end(begun, form)

    run(EAGER, 60.0)
    run(COMPILED, 30.0)
    assert pace.speed() == Speed(COMPILED, "64x64", _ms(eager=60.0, compiled=30.0))
    for other in ({"side": 16}, {"length": 40}, {"more": 3}):
        run(COMPILED, 90.0, **other)
        speed = pace.speed()
        assert speed is not None and speed.ms == _ms(compiled=90.0), other


def test_nothing_is_compared_with_another_size(clock: Clock) -> None:
    pace = Pace(Times())
    _run(pace, clock, EAGER, [61.0] * 3)
    _run(pace, clock, COMPILED, [120.0] * 3, side=16)
    assert pace.speed() == Speed(COMPILED, "128x128", _ms(compiled=120.0))


def test_a_step_is_all_of_its_calls(clock: Clock) -> None:
    """Prompts of different lengths run one after the other; some samplers look twice."""
    pace = Pace(Times())
    _run(pace, clock, EAGER, [30.0] * 8, steps=4)
    assert pace.speed() == Speed(EAGER, "64x64", _ms(eager=60.0))
    _run(pace, clock, COMPILED, [15.0] * 3, steps=4)  # still running
    assert pace.speed() == Speed(COMPILED, "64x64", _ms(eager=60.0, compiled=30.0))


def test_sessions_of_one_model_share_its_eager_times(clock: Clock) -> None:
    shared = Times()
    _run(Pace(shared), clock, EAGER, [61.0] * 3)
    after = Pace(shared)
    _run(after, clock, COMPILED, [31.0] * 3)
    assert after.speed() == Speed(COMPILED, "64x64", _ms(eager=61.0, compiled=31.0))


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
            times.add(((size,),), 1.0)
    assert times.typical(((4,),)) is None and times.typical(((5,),)) == 1.0


def test_what_eager_took_in_an_earlier_process_stands_until_it_is_measured_anew(
    clock: Clock,
) -> None:
    before = Times()
    _run(Pace(before), clock, EAGER, [61.0, 60.0, 62.0])
    shared = Times(before.all_quickest())
    pace = Pace(shared)
    _run(pace, clock, COMPILED, [31.0] * 3)
    assert pace.speed() == Speed(COMPILED, "64x64", _ms(eager=60.0, compiled=31.0))
    _run(pace, clock, COMPILED, [31.0] * 3, side=16)
    assert pace.speed() == Speed(COMPILED, "128x128", _ms(compiled=31.0))
    _run(pace, clock, EAGER, [50.0] * 3)
    _run(pace, clock, COMPILED, [31.0] * 3)
    assert pace.speed() == Speed(COMPILED, "64x64", _ms(eager=50.0, compiled=31.0))
    assert list(shared.all_quickest().values()) == pytest.approx([50.0])


def test_nothing_is_compared_with_an_eager_step_that_something_ran_beside(clock: Clock) -> None:
    shared, builds = Times(), [True]
    pace = Pace(shared, is_disturbed=lambda: builds[0])
    _run(pace, clock, EAGER, [900.0] * 3)
    assert pace.speed() == Speed(EAGER, "64x64", _ms(eager=900.0))
    assert pace.take_run() == TimedRun("64x64", 1, 3, EAGER, pytest.approx(900.0), None)
    _run(pace, clock, COMPILED, [31.0] * 3)
    assert pace.speed() == Speed(COMPILED, "64x64", _ms(compiled=31.0))
    assert shared.all_quickest() == {}
    begun = pace.begin((torch.zeros(1, 4, 8, 8),), {"o": {"sample_sigmas": torch.zeros(4)}})
    assert begun is not None
    builds[0] = False  # it came to its end within the step
    pace.end(begun, EAGER)
    _run(pace, clock, EAGER, [61.0] * 3)
    assert pace.speed() == Speed(EAGER, "64x64", _ms(eager=61.0, compiled=31.0))


def test_a_run_is_told_once_when_it_has_ended(clock: Clock) -> None:
    pace = Pace(Times(), LatentScale(16, 4))
    assert pace.take_run() is None
    _run(pace, clock, EAGER, [61.0] * 4)
    assert pace.take_run() == TimedRun(
        "128x128", 1, 4, EAGER, pytest.approx(61.0), pytest.approx(61.0)
    )
    assert pace.take_run() is None
    options = {"sample_sigmas": torch.zeros(9), "cond_or_uncond": [0, 1]}
    for _ in range(2):  # of eight steps: it was cancelled
        latent = torch.zeros(6, 16, 5, 3, 4)
        begun = pace.begin((latent,), {"transformer_options": options})
        assert begun is not None
        clock.pass_by(10)
        pace.end(begun, COMPILED)
    assert pace.take_run() == TimedRun("64x48, 17 frames", 3, 2, COMPILED, None, None)


def _factor(pace: Pace) -> tuple[float, str] | None:
    gain = pace.gain()
    return None if gain is None else (round(gain.factor, 2), gain.size)


def test_the_factor_stays_when_the_size_changes(clock: Clock) -> None:
    """That of the nearest measured size stands for one that was not, and says which it is."""
    pace = Pace(Times())
    for side, eager in ((8, 60.0), (32, 600.0)):
        _run(pace, clock, EAGER, [eager] * 3, side=side)
        assert _factor(pace) is None
        _run(pace, clock, COMPILED, [eager / (side / 8 + 1)] * 3, side=side)
        pace.take_run()
    assert _factor(pace) == (5.0, "256x256")
    for side, nearest in ((9, (2.0, "64x64")), (15, (2.0, "64x64")), (40, (5.0, "256x256"))):
        _run(pace, clock, COMPILED, [7.0] * 3, side=side)
        assert _factor(pace) == nearest


def test_a_factor_stands_after_a_restart(clock: Clock) -> None:
    before = Times()
    pace = Pace(before)
    _run(pace, clock, EAGER, [60.0] * 3)
    _run(pace, clock, COMPILED, [20.0] * 3)
    pace.take_run()
    after = Pace(Times(before.all_quickest(), before.gains.all()))
    _run(after, clock, COMPILED, [90.0] * 3, side=16)
    assert _factor(after) == (3.0, "64x64")


def test_steps_that_only_some_graphs_served_say_nothing_of_those_with_all(clock: Clock) -> None:
    pace = Pace(Times())
    _run(pace, clock, EAGER, [60.0] * 3)
    options = {"sample_sigmas": torch.zeros(9)}

    def step(served: int, milliseconds: float) -> None:
        latent = torch.zeros(1, 4, 8, 8)
        begun = pace.begin((latent, torch.zeros(1)), {"transformer_options": options})
        assert begun is not None
        clock.pass_by(milliseconds)
        pace.end(begun, COMPILED, served)

    for served, milliseconds in ((3, 50.0), (3, 50.0), (8, 50.0), (23, 20.0), (23, 20.0)):
        step(served, milliseconds)
    assert pace.speed() is None
    step(23, 20.0)
    assert _factor(pace) == (3.0, "64x64")


def test_three_runs_in_a_row_are_called_slower(clock: Clock) -> None:
    builds = [False]
    pace = Pace(Times(), is_disturbed=lambda: builds[0])
    _run(pace, clock, EAGER, [60.0] * 3)

    def run(milliseconds: float, side: int = 8) -> bool:
        _run(pace, clock, COMPILED, [milliseconds] * 20, side=side)
        pace.take_run()
        return pace.is_slower

    assert [run(70.0) for _ in range(4)] == [False, False, True, True]
    builds[0] = True
    assert run(700.0)  # neither better nor worse: something ran beside it
    builds[0] = False
    assert [run(time) for time in (50.0, 70.0, 70.0)] == [False, False, False]
    assert not run(70.0, side=16)  # nothing is known of that size
    assert [run(70.0) for _ in range(3)] == [False, False, True]
