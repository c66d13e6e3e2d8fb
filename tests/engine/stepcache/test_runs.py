"""Step Cache in runs that rise again, go back, end early, or come by turns."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from warmgraph_backends.stepcache.forecast import Forecast

from ..deepcache.cached import Pair
from ..deepcache.sampling import sample_custom
from .stepped import FULL, STEPS, Reads, Reference, cache_of, check, evaluations, stepped
from .test_kept import Watch

CALLS = {"full": 7, "forecast": 5}


# --- sigmas that do not only fall -----------------------------------------------------------------


def _falling_twice(rise: int) -> torch.Tensor:
    """Sigmas of a run that begins anew, from a lower one, at a step."""
    first = torch.linspace(12.0, 2.0, rise)
    return torch.cat([first, torch.linspace(7.0, 0.0, STEPS + 1 - rise)])


@pytest.mark.parametrize(
    ("rise", "full"),
    [
        pytest.param(5, FULL, id="at_a_forecast_step"),
        pytest.param(7, FULL, id="at_a_computed_step"),
        pytest.param(7, FULL - {8}, id="between_the_last_two_computed_steps"),
    ],
)
def test_sigmas_that_rise_again(xl: Pair, rise: int, full: frozenset[int]) -> None:
    """Where the way ahead leads back, the last velocity is used again."""
    sigmas = _falling_twice(rise)

    def sample(model: Any, **_: Any) -> torch.Tensor:
        return sample_custom(xl, model, sigmas=sigmas)

    assert check(xl, sample=sample, full=full) == {"full": len(full), "forecast": 12 - len(full)}


def test_two_computed_steps_at_one_sigma(xl: Pair) -> None:
    """No line goes through them."""
    sigmas = torch.linspace(12.0, 0.0, STEPS + 1)
    sigmas[5:8] = sigmas[4]

    def sample(model: Any, **_: Any) -> torch.Tensor:
        return sample_custom(xl, model, sigmas=sigmas)

    full = FULL - {8}
    assert check(xl, sample=sample, full=full) == {"full": 6, "forecast": 6}


class _Again(Reference):
    """Forgets all once the sampler has called back with a lower number."""

    def __init__(self, full: Any, *, back_at: int, **options: Any) -> None:
        super().__init__(full, **options)
        self._back_at = back_at

    def _around_evaluation(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        if self._evaluation == self._back_at:
            self._made, self._last = {}, 0
        return super()._around_evaluation(executor, *args, **kwargs)


def test_a_sampler_that_goes_back(xl: Pair) -> None:
    """It makes steps 4 to 7 once more, from noise that it adds. Its first callback tells; what it
    evaluated before is step 8's, and what is kept then begins anew.
    """
    from comfy.k_diffusion.sampling import to_d
    from comfy.samplers import KSAMPLER

    order = [*range(8), *range(4, STEPS)]

    def restarting(
        model: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any, disable: Any
    ) -> torch.Tensor:
        noise = torch.Generator().manual_seed(5)
        for before, i in zip([-1, *order], order, strict=False):
            if i < before:
                x = x + torch.randn(x.shape, generator=noise) * sigmas[i]
            denoised = model(x, sigmas[i] * x.new_ones(len(x)), **extra_args)
            callback({"x": x, "i": i, "sigma": sigmas[i], "denoised": denoised})
            x = x + to_d(x, sigmas[i], denoised) * (sigmas[i + 1] - sigmas[i])
        return x

    def sample(model: Any, **_: Any) -> torch.Tensor:
        return sample_custom(xl, model, sampler=KSAMPLER(restarting), steps=STEPS)

    full = {0, 1, 2, 8, 11}
    steps = [*range(9), *range(5, STEPS)]
    reference = _Again(full, back_at=8, step_of=steps)
    # After the first three: 8, as it goes back; 5 and 6, for nothing is kept then; 8 and 11.
    counts = check(xl, sample=sample, full=full, reference=reference)
    assert counts == {"full": 3 + 1 + 2 + 2, "forecast": 5 + 1 + 2}


# --- runs that end early --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["interrupt", "error"])
@pytest.mark.parametrize("where", ["guidance", "callback"])
def test_what_stops_a_run_in_a_forecast_step_leaves_nothing(xl: Pair, where: str, how: str) -> None:
    """No layer of the host's is called in it: its callback or another node's guidance stops."""
    import comfy.model_management as management
    from comfy.patcher_extension import WrappersMP

    error = RuntimeError if how == "error" else management.InterruptProcessingException
    expected = xl.sample(stepped(xl.model), steps=STEPS)
    ours = stepped(xl.model)
    cache, watch, reads = cache_of(ours), Watch(), Reads(ours)

    def stop() -> None:
        if cache.evaluations["forecast"] == 2:
            raise error("theirs")

    def guide(args: dict[str, Any]) -> torch.Tensor:
        stop()
        result: torch.Tensor = args["denoised"]
        return result

    def around(
        executor: Any, guider: Any, sigmas: Any, extra: Any, callback: Any, *others: Any
    ) -> Any:
        def back(*given: Any) -> None:
            callback(*given)
            stop()

        return executor(guider, sigmas, extra, back, *others)

    stopped = watch.attach(ours)
    if where == "guidance":
        stopped.set_model_sampler_post_cfg_function(guide)
    else:
        stopped.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "tests.stop", around)
    with pytest.raises(error, match="theirs"):
        xl.sample(stopped, steps=STEPS)
    assert cache.evaluations["forecast"] == 2 and reads.found == ["tolist"]
    gc.collect()  # an exception's frames
    assert watch.kept and watch.alive == 0 and cache._run is None and cache.problem is None
    assert torch.equal(xl.sample(ours, steps=STEPS), expected)


def test_a_cancel_in_a_forecast_ends_the_run(xl: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the user's, and no reason to step aside."""
    import comfy.model_management as management

    from warmgraph_backends.stepcache import cache as module

    def cancelled(*args: Any, **kwargs: Any) -> Any:
        raise management.InterruptProcessingException

    ours = stepped(xl.model)
    with monkeypatch.context() as patched:
        patched.setattr(module, "forecast", cancelled)
        with pytest.raises(management.InterruptProcessingException):
            xl.sample(ours, steps=STEPS)
    cache = cache_of(ours)
    assert cache._run is None and cache.problem is None
    assert torch.equal(xl.sample(ours, steps=STEPS), xl.sample(stepped(xl.model), steps=STEPS))


# --- several in a prompt --------------------------------------------------------------------------


def test_clones_of_other_settings_by_turns(xl: Pair) -> None:
    """Parts of one schedule, each a run of twelve steps, on one model's weights."""
    other = {0, 1, 6, 11}
    latent = {"samples": torch.zeros(1, 4, 8, 9)}
    parts = [(begin, begin + STEPS) for begin in range(0, 5 * STEPS, STEPS)]

    def sample(one: Any, two: Any) -> torch.Tensor:
        image: torch.Tensor = xl.host.sample_parts(
            [one, two, xl.model, two, one],
            xl.positive,
            xl.negative,
            parts,
            steps=5 * STEPS,
            latent=latent,
        )
        assert image.isfinite().all()
        return image

    references = Reference(), Reference(other, share=1.0)
    expected = sample(*(reference.attach(xl.model) for reference in references))
    one, two = stepped(xl.model), stepped(xl.model, other, forecast=Forecast.LINE).clone()
    reads = Reads(one), Reads(two)
    assert torch.equal(sample(one, two), expected)
    assert [evaluations(one), evaluations(two)] == [each.counts for each in references]
    assert [each.found for each in reads] == [["tolist"] * 2] * 2
