"""DeepCache under every sampler of the host: which evaluations are of one step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from .cached import STEPS, THIRDS, Pair, Reference, cached, evaluations
from .sampling import Trace, sample_custom

#: DeepCache's other tests show what is compiled; these take minutes.
pytestmark = pytest.mark.slow

#: Samplers that evaluate more than once a step, with how often in a step but the last.
#: All call back right after the first evaluation of a step.
SEVERAL = {
    "heun": 2,
    "heunpp2": 3,
    "exp_heun_2_x0": 2,
    "exp_heun_2_x0_sde": 2,
    "dpm_2": 2,
    "dpm_2_ancestral": 2,
    "dpmpp_2s_ancestral": 2,
    "dpmpp_2s_ancestral_cfg_pp": 2,
    "dpmpp_sde": 2,
    "dpmpp_sde_gpu": 2,
    "seeds_2": 2,
    "seeds_3": 3,
    "sa_solver_pece": 2,
}
#: They make steps of their own, whose number is not the schedule's.
SOLVERS = ("dpm_fast", "dpm_adaptive")


#: Ends of names by which a sampler is another one on other noise, or in another guidance.
_FURTHER = ("_gpu", "_cfg_pp", "_ancestral", "_heun", "_sde", "_bh2", "ddim")


def _some(names: Collection[str], *but: str) -> list[Any]:
    """Names; where not all tests run, without those of further forms of others, and `but`."""
    return [
        pytest.param(name, marks=pytest.mark.slow if name.endswith((*_FURTHER, *but)) else [])
        for name in names
    ]


def _steps_of(pair: Pair, **sampling: Any) -> list[int]:
    """The step of each evaluation of a plain run."""
    trace = Trace()
    pair.sample(trace.attach(pair.model), **sampling)
    return [number for number, calls in enumerate(trace.steps) for _ in calls]


def _names() -> list[str]:
    """All of the host's samplers, as of 0.30; `test_no_sampler_is_left_out` compares."""
    single = (
        "euler euler_cfg_pp euler_ancestral euler_ancestral_cfg_pp lms dpmpp_2m dpmpp_2m_cfg_pp "
        "dpmpp_2m_sde dpmpp_2m_sde_gpu dpmpp_2m_sde_heun dpmpp_2m_sde_heun_gpu dpmpp_3m_sde "
        "dpmpp_3m_sde_gpu ddpm lcm ipndm ipndm_v deis res_multistep res_multistep_cfg_pp "
        "res_multistep_ancestral res_multistep_ancestral_cfg_pp gradient_estimation "
        "gradient_estimation_cfg_pp er_sde sa_solver ddim uni_pc uni_pc_bh2"
    )
    return single.split()


def test_no_sampler_is_left_out(xl: Pair) -> None:
    import comfy.samplers

    assert {*_names(), *SEVERAL, *SOLVERS} == set(comfy.samplers.SAMPLER_NAMES)


@pytest.mark.parametrize("sampler", _some(_names()))
def test_samplers_of_one_evaluation_a_step(xl: Pair, sampler: str) -> None:
    assert xl.check(sampler=sampler) == {"full": 3, "shallow": 4}


@pytest.mark.parametrize("sampler", _some([*SEVERAL, *SOLVERS], "dpm_adaptive", "_2"))
def test_interval_one_changes_nothing(xl: Pair, sampler: str) -> None:
    ours = cached(xl.model, interval=1)
    assert torch.equal(xl.sample(ours, sampler=sampler), xl.sample(xl.model, sampler=sampler))
    assert evaluations(ours)["shallow"] == 0


@pytest.mark.parametrize("sampler", _some(SEVERAL))
def test_what_is_evaluated_between_two_callbacks_is_of_one_sort(xl: Pair, sampler: str) -> None:
    """All of these call back right after the first evaluation of a step."""
    steps = _steps_of(xl, sampler=sampler)
    assert steps.count(0) == 1 and steps.count(2) == SEVERAL[sampler]
    trace = Trace()
    found = xl.sample(trace.attach(cached(xl.model, interval=3)), sampler=sampler)
    sorts = [set(calls) for calls in trace.steps[:STEPS]]
    assert sorts == [{"full"} if n in THIRDS else {"shallow"} for n in range(STEPS)]
    reference = Reference({*THIRDS, STEPS}, step_of=steps).attach(xl.model)
    assert torch.equal(found, xl.sample(reference, sampler=sampler))


@pytest.mark.parametrize("sampler", SOLVERS)
def test_solvers_that_make_steps_of_their_own(xl: Pair, sampler: str) -> None:
    """Those beyond the schedule's are full ones."""
    trace = Trace()
    xl.sample(trace.attach(cached(xl.model, interval=2)), sampler=sampler)
    sorts = [set(calls) for calls in trace.steps if calls]
    assert len(sorts) > 2 and [{"full"}, {"shallow"}] == sorts[:2]
    for number, calls in enumerate(sorts):
        assert calls == ({"full"} if number % 2 == 0 or number >= STEPS else {"shallow"})


def _custom(pair: Pair, function: Callable[..., torch.Tensor], **sampling: Any) -> Any:
    """`sample(model)` through SamplerCustom with a sampler that another node brought."""
    import comfy.samplers

    given = {"sampler": comfy.samplers.KSAMPLER(function), **sampling}

    def sample(model: Any) -> torch.Tensor:
        return sample_custom(pair, model, **given)

    return sample


def _euler(number: Callable[[int, int], list[int]]) -> Callable[..., torch.Tensor]:
    """A plain Euler sampler that calls back with the numbers that a function gives for a step."""

    def sample(
        model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args: Any, callback: Any, **_: Any
    ) -> torch.Tensor:
        ones = x.new_ones([x.shape[0]])
        for i in range(len(sigmas) - 1):
            denoised = model(x, sigmas[i] * ones, **extra_args)
            for n in number(i, len(sigmas) - 1):
                callback({"x": x, "i": n, "sigma": sigmas[i], "denoised": denoised})
            x = x + (x - denoised) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
        return x

    return sample


def test_a_sampler_that_calls_back_twice_a_step(xl: Pair) -> None:
    xl.check(sample=_custom(xl, _euler(lambda i, n: [i, i])))


def test_a_sampler_that_never_calls_back_runs_unchanged(xl: Pair) -> None:
    sample = _custom(xl, _euler(lambda i, n: []))
    ours = cached(xl.model, interval=3)
    assert torch.equal(sample(ours), sample(xl.model))
    assert evaluations(ours) == {"full": STEPS}


def test_a_sampler_that_counts_down(xl: Pair) -> None:
    """Numbers name steps that it did not make; what it reuses is still of a full step before."""
    sample = _custom(xl, _euler(lambda i, n: [n - 1 - i]))
    ours = cached(xl.model, interval=3)
    image = sample(ours)
    counts = evaluations(ours)
    assert counts["full"] + counts["shallow"] == STEPS and counts["shallow"] <= 4
    assert (image - sample(xl.model)).norm() < image.norm()


def _restarting(at: int, steps: int) -> Callable[..., torch.Tensor]:
    """A sampler that adds noise after `at` steps, and samples again from the second one on."""

    def sample(
        model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args: Any, callback: Any, **_: Any
    ) -> torch.Tensor:
        ones = x.new_ones([x.shape[0]])
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
        for n, i in enumerate([*range(at), *range(1, steps)]):
            if n == at:
                x = x + noise * sigmas[1]
            denoised = model(x, sigmas[i] * ones, **extra_args)
            callback({"x": x, "i": i, "sigma": sigmas[i], "denoised": denoised})
            x = x + (x - denoised) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
        return x

    return sample


@pytest.mark.parametrize("steps", [6, 7])
def test_after_a_restart_nothing_of_the_time_before_is_reused(xl: Pair, steps: int) -> None:
    """Its first evaluation is of a step that the schedule lacks; the next one finds nothing."""
    sample = _custom(xl, _restarting(steps, steps), steps=steps)
    ours = cached(xl.model, interval=3)
    found = sample(ours)
    numbers = [*range(steps), *range(1, steps)]
    full = {n for n, step in enumerate(numbers) if step % 3 == 0} | {steps, steps + 1}
    assert torch.equal(found, sample(Reference(full).attach(xl.model)))


def test_after_a_restart_in_the_middle_nothing_of_the_time_before_is_reused(xl: Pair) -> None:
    """That it is one is known once it calls back."""
    sample = _custom(xl, _restarting(5, 8), steps=8)
    ours = cached(xl.model, interval=4)
    found = sample(ours)
    numbers = [*range(5), *range(1, 8)]  # the sixth evaluation is taken for step 5, a shallow one
    full = {n for n, step in enumerate(numbers) if step % 4 == 0} | {6}
    assert torch.equal(found, sample(Reference(full).attach(xl.model)))


def test_a_sampler_that_lets_the_latent_grow_takes_a_full_step_at_every_size(xl: Pair) -> None:
    sampler = xl.node(
        "SamplerLCMUpscale", scale_ratio=1.6, scale_steps=2, upscale_method="nearest-exact"
    )
    counts = xl.check(
        sample=lambda model: sample_custom(xl, _seeded(model), sampler=sampler), full=THIRDS
    )
    assert counts == {"full": 5, "shallow": 2}  # it grows before steps 1 and 2


def _seeded(model: Any) -> Any:
    """The sampler draws its noise from the global generator."""
    torch.manual_seed(3)
    return model
