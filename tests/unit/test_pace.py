"""How long steps take: by size and form, of the whole step, and never invented."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends.host_api.models import LatentScale
from warmgraph_backends.runtime import pace as room
from warmgraph_backends.runtime.gains import Figure
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
    text: int = 77,
    calls: int = 1,
    first: float = 900.0,
) -> None:
    """A sampler's run, a time for each call of the model after the first, in which something is
    done once.

    Args:
        steps: as many as times and the first one, if not given.
        text: how many tokens its text has.
        calls: in an evaluation, each with its own text.
    """
    options = {"sample_sigmas": torch.zeros((steps or len(times) + 1) + 1)}
    for number, milliseconds in enumerate((first, *times)):
        latent = torch.zeros(1, 4, side, side)
        if not number % calls:
            options["sigmas"] = torch.zeros(1)
        named = {"context": torch.zeros(1, text + number % calls, 5)}
        begun = pace.begin((latent, torch.zeros(1)), {**named, "transformer_options": options})
        assert begun is not None
        clock.pass_by(milliseconds)
        pace.end(begun, form)


def _said(pace: Pace) -> tuple[str, float] | None:
    """The verdict and the factor of the last steps."""
    gain = pace.gain()
    return None if gain is None else (gain.verdict.value, round(gain.factor, 2))


#: Of four runs of one model, the same work in each.
QUIET = [61.0, 60.0, 62.0, 61.0, 61.0, 60.0, 61.0]
BUSY = [61.0, 95.0, 60.0, 140.0, 88.0, 61.0, 120.0]


def test_a_step_is_told_beside_the_models_own_eager_ones(clock: Clock) -> None:
    pace = Pace(Times())
    assert pace.speed() is None
    _run(pace, clock, EAGER, [500.0, 64.0])
    assert pace.speed() is None  # two calls say nothing
    _run(pace, clock, EAGER, [60.0, 61.0, 62.0])
    assert pace.speed() == Speed(EAGER, "64x64", _ms(eager=62.0))  # those two with these
    _run(pace, clock, EAGER, [61.0, 62.0, 63.0])
    assert pace.speed() == Speed(EAGER, "64x64", _ms(eager=62.0))
    _run(pace, clock, COMPILED, [90.0, 31.0, 30.0, 31.0])
    assert pace.speed() == Speed(COMPILED, "64x64", _ms(eager=62.0, compiled=31.0))
    _run(pace, clock, EXACT, [40.0, 41.0, 42.0])
    every = _ms(eager=62.0, exact=41.0, compiled=31.0)
    assert pace.speed() == Speed(EXACT, "64x64", every)


def test_a_figure_is_of_one_run_and_without_what_its_first_step_does_once(clock: Clock) -> None:
    """Runs before it, quicker or slower, are no part of it."""
    pace = Pace(Times())
    for times in ([20.0] * 9, [200.0] * 9, QUIET):
        _run(pace, clock, EAGER, times, first=5000.0)
        run = pace.take_run()
        assert run is not None and run.ms == pytest.approx(sorted(times)[len(times) // 2])
    _run(pace, clock, COMPILED, [31.0] * 3, first=9000.0)
    assert _said(pace) == ("faster", 1.97)
    run = pace.take_run()
    assert run is not None and (run.ms, run.eager_ms) == (pytest.approx(31.0), pytest.approx(61.0))


@pytest.mark.parametrize(
    ("eager", "ours", "said"),
    [
        (QUIET, QUIET, ("same", 1.0)),
        (QUIET, BUSY, ("same", 0.69)),
        (BUSY, QUIET, ("same", 1.44)),
        (QUIET, [70.0] * 7, ("slower", 0.87)),
        (QUIET, [56.0] * 7, ("faster", 1.09)),
        (BUSY, [20.0] * 7, ("faster", 4.4)),
        (QUIET, [300.0, 310.0, 320.0, 300.0, 305.0], ("slower", 0.2)),
    ],
)
def test_a_difference_that_the_machines_noise_hides_is_none(
    clock: Clock, eager: list[float], ours: list[float], said: tuple[str, float]
) -> None:
    """Slower is known after one run, as faster is."""
    pace = Pace(Times())
    _run(pace, clock, EAGER, eager)
    _run(pace, clock, COMPILED, ours)
    assert _said(pace) == said


def test_a_texts_length_is_no_part_of_an_images_size(clock: Clock) -> None:
    pace = Pace(Times())
    _run(pace, clock, EAGER, QUIET)
    _run(pace, clock, COMPILED, [30.0] * 4, text=154)
    assert pace.speed() == Speed(COMPILED, "64x64", _ms(eager=61.0, compiled=30.0))
    assert _said(pace) == ("faster", 2.03)


def test_a_latent_of_several_tensors_is_of_their_sizes(clock: Clock) -> None:
    """Sound and video come as one; another length of either, or of a reference, is another size."""
    pace = Pace(Times())

    def run(form: str, time: float, *, side: int = 8, length: int = 20, more: int = 0) -> None:
        options = {"sample_sigmas": torch.zeros(5)}
        for _ in range(4):
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
    assert _said(pace) is None


def test_a_step_is_all_of_its_calls(clock: Clock) -> None:
    """Some samplers look twice, and prompts of different lengths run one after the other."""
    pace = Pace(Times())
    _run(pace, clock, EAGER, [30.0] * 7, steps=4)
    assert pace.speed() == Speed(EAGER, "64x64", _ms(eager=60.0))
    _run(pace, clock, COMPILED, [15.0] * 4, steps=6)  # still running
    assert pace.speed() == Speed(COMPILED, "64x64", _ms(eager=60.0, compiled=30.0))
    _run(pace, clock, COMPILED, [15.0] * 7, steps=4, calls=2)
    run = pace.take_run()
    assert run is not None and (run.steps, run.ms) == (4, pytest.approx(30.0))


def test_steps_that_a_cache_skips_are_no_calls(clock: Clock) -> None:
    """Of twenty steps eleven were computed, in two calls each: one takes what two calls take."""
    pace = Pace(Times())
    _run(pace, clock, EAGER, [30.0] * 39, steps=20, calls=2)
    _run(pace, clock, COMPILED, [15.0] * 21, steps=20, calls=2)
    assert pace.speed() == Speed(COMPILED, "64x64", _ms(eager=60.0, compiled=30.0))
    run = pace.take_run()
    assert run is not None and (run.steps, run.ms) == (11, pytest.approx(30.0))
    assert _said(pace) == ("faster", 2.0)


def test_a_cancelled_run_tells_what_its_own_steps_took_or_nothing(clock: Clock) -> None:
    pace = Pace(Times())
    _run(pace, clock, EAGER, QUIET)
    _run(pace, clock, COMPILED, [30.0] * 5)
    _run(pace, clock, COMPILED, [90.0], steps=20)
    run = pace.take_run()
    assert run is not None and (run.steps, run.ms) == (2, None)
    assert _said(pace) == ("faster", 2.03)  # as the run before it was
    _run(pace, clock, COMPILED, [20.0] * 4, steps=20)
    run = pace.take_run()
    assert run is not None and (run.steps, run.ms) == (5, pytest.approx(20.0))


def test_two_samplers_of_a_prompt_are_two_runs(clock: Clock) -> None:
    """The second may be another sampler, at the same size or a larger one."""
    pace = Pace(Times())
    told = []
    for form, time in ((EAGER, 60.0), (COMPILED, 20.0)):
        for steps, side, calls in ((8, 8, 7), (4, 8, 7), (8, 16, 7)):
            _run(pace, clock, form, [time * side / 8] * calls, side=side, steps=steps)
            told.append(pace.take_run())
    known = [(run.size, run.steps, round(run.ms or 0), run.form) for run in told if run]
    assert known == [
        ("64x64", 8, 60, EAGER),
        ("64x64", 4, 120, EAGER),
        ("128x128", 8, 120, EAGER),
        ("64x64", 8, 20, COMPILED),
        ("64x64", 4, 40, COMPILED),
        ("128x128", 8, 40, COMPILED),
    ]
    assert all(run.eager_ms == pytest.approx(3 * (run.ms or 0)) for run in told[3:] if run)


def test_runs_of_one_or_two_steps_are_taken_together(clock: Clock) -> None:
    pace = Pace(Times())
    for _ in range(3):
        _run(pace, clock, EAGER, [], first=60.0, steps=1)
    for _ in range(3):
        _run(pace, clock, COMPILED, [20.0])
    assert pace.speed() == Speed(COMPILED, "64x64", _ms(eager=60.0, compiled=20.0))


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
    times, run = Times(), object()
    for size in range(room.KEPT_SIZES + 5):
        for _ in range(room.FEWEST_CALLS):
            times.add(((size,),), 1.0, run)
    assert times.figure(((4,),)) is None and times.figure(((5,),)) == Figure(1.0)


def test_what_eager_took_in_an_earlier_process_stands_until_it_is_measured_anew(
    clock: Clock,
) -> None:
    before = Times()
    _run(Pace(before), clock, EAGER, [61.0, 60.0, 62.0])
    shared = Times(before.all())
    pace = Pace(shared)
    _run(pace, clock, COMPILED, [31.0] * 3)
    assert pace.speed() == Speed(COMPILED, "64x64", _ms(eager=61.0, compiled=31.0))
    _run(pace, clock, COMPILED, [31.0] * 3, side=16)
    assert pace.speed() == Speed(COMPILED, "128x128", _ms(compiled=31.0))
    _run(pace, clock, EAGER, [70.0] * 3)
    _run(pace, clock, COMPILED, [31.0] * 3)
    assert pace.speed() == Speed(COMPILED, "64x64", _ms(eager=70.0, compiled=31.0))
    assert [figure.ms for figure in shared.all().values()] == pytest.approx([70.0])


@pytest.mark.parametrize("form", [EAGER, COMPILED])
def test_nothing_is_compared_with_a_step_that_something_ran_beside(clock: Clock, form: str) -> None:
    shared, builds = Times(), [True]
    pace = Pace(shared, is_disturbed=lambda: builds[0])
    other = COMPILED if form == EAGER else EAGER
    _run(pace, clock, form, [900.0] * 3)
    assert pace.speed() == Speed(form, "64x64", _ms(**{form: 900.0}))
    run = pace.take_run()
    assert run is not None and run.busy and run.ms == pytest.approx(900.0) and not run.eager_ms
    builds[0] = False
    _run(pace, clock, other, [31.0] * 3)
    assert pace.speed() == Speed(other, "64x64", _ms(**{other: 31.0}))
    assert pace.gain() is None
    builds[0] = True
    begun = pace.begin((torch.zeros(1, 4, 8, 8),), {"o": {"sample_sigmas": torch.zeros(4)}})
    assert begun is not None
    builds[0] = False  # it came to its end within the step
    pace.end(begun, form)
    _run(pace, clock, form, [61.0] * 3)
    assert pace.speed() == Speed(form, "64x64", _ms(**{form: 61.0, other: 31.0}))


def test_a_run_is_told_once_when_it_has_ended(clock: Clock) -> None:
    pace = Pace(Times(), LatentScale(16, 4))
    assert pace.take_run() is None
    _run(pace, clock, EAGER, [61.0, 61.0, 63.0, 63.0])
    figures = pytest.approx(62.0), pytest.approx(1.4826)
    assert pace.take_run() == TimedRun(
        "128x128", 1, 5, EAGER, *figures, busy=False, eager_ms=figures[0]
    )
    assert pace.take_run() is None
    options = {"sample_sigmas": torch.zeros(9), "cond_or_uncond": [0, 1]}
    for _ in range(2):  # of eight steps: it was cancelled
        latent = torch.zeros(6, 16, 5, 3, 4)
        begun = pace.begin((latent,), {"transformer_options": options})
        assert begun is not None
        clock.pass_by(10)
        pace.end(begun, COMPILED)
    assert pace.take_run() == TimedRun(
        "64x48, 17 frames", 3, 2, COMPILED, None, None, busy=False, eager_ms=None
    )


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
    after = Pace(Times(before.all(), before.gains.all()))
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
