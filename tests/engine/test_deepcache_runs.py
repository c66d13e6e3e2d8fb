"""DeepCache and sampler runs: every sampler of the host, what comes before and after a run, and how
a run's conditioning is cut into calls.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.deepcache.features import form_of
from warmgraph_backends.deepcache.schedule import Schedule
from warmgraph_tools.inprocess import Host

from .cached import STEPS, THIRDS, Pair, Reference, cache_of, cached, evaluations

pytestmark = pytest.mark.usefixtures("one_thread")

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
SOLVERS = ("dpm_fast", "dpm_adaptive")
"""They make steps of their own, whose number is not the schedule's."""


@pytest.fixture(scope="module")
def xl(host: Host) -> Pair:
    return Pair(host, "narrowxl")


class Trace:
    """What a sampler does in order: ("call", sort of its evaluation) and ("back", number)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def attach(self, model: Any) -> Any:
        """Return a clone that is traced, with the sorts of the DeepCache it carries, if any."""
        from comfy.patcher_extension import WrappersMP

        from warmgraph_backends.attach.deepcache import kept

        cache = kept(model)

        def around_run(executor: Any, *args: Any, **kwargs: Any) -> Any:
            guider, sigmas, extra, callback, *others = args

            def back(number: int, *given: Any, **named: Any) -> Any:
                self.events.append(("back", number))
                return callback(number, *given, **named)

            return executor(guider, sigmas, extra, back, *others, **kwargs)

        def around_evaluation(executor: Any, *args: Any, **kwargs: Any) -> Any:
            before = cache.evaluations["shallow"] if cache else 0
            result = executor(*args, **kwargs)
            is_shallow = cache is not None and cache.evaluations["shallow"] > before
            self.events.append(("call", "shallow" if is_shallow else "full"))
            return result

        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "tests.trace", around_run)
        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "tests.trace", around_evaluation)
        return clone

    @property
    def steps(self) -> list[list[str]]:
        """The sorts of what is evaluated until each time that the sampler calls back, and after."""
        steps: list[list[str]] = [[]]
        for event, value in self.events:
            if event == "call":
                steps[-1].append(value)
            else:
                steps.append([])
        return steps


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


# --- samplers -------------------------------------------------------------------------------------


def test_no_sampler_is_left_out(xl: Pair) -> None:
    import comfy.samplers

    assert {*_names(), *SEVERAL, *SOLVERS} == set(comfy.samplers.SAMPLER_NAMES)


@pytest.mark.parametrize("sampler", _names())
def test_samplers_of_one_evaluation_a_step(xl: Pair, sampler: str) -> None:
    assert xl.check(sampler=sampler) == {"full": 3, "shallow": 4}


@pytest.mark.parametrize("sampler", [*SEVERAL, *SOLVERS])
def test_interval_one_changes_nothing(xl: Pair, sampler: str) -> None:
    ours = cached(xl.model, interval=1)
    assert torch.equal(xl.sample(ours, sampler=sampler), xl.sample(xl.model, sampler=sampler))
    assert evaluations(ours)["shallow"] == 0


@pytest.mark.parametrize("sampler", SEVERAL)
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


def sample_custom(
    pair: Pair,
    model: Any,
    *,
    sampler: Any = None,
    steps: int = STEPS,
    sigmas: Any = None,
    cfg: float = 7.0,
    latent: Any = None,
    **others: Any,
) -> torch.Tensor:
    """Sample by SamplerCustom."""
    if sigmas is None:
        sigmas = pair.node(
            "BasicScheduler", model=model, scheduler="normal", steps=steps, denoise=1.0
        )
    latent = pair.node(
        "SamplerCustom",
        model=model,
        add_noise=True,
        noise_seed=2,
        cfg=cfg,
        positive=pair.positive,
        negative=pair.negative,
        sampler=sampler or pair.node("KSamplerSelect", sampler_name="euler"),
        sigmas=sigmas,
        latent_image=latent or {"samples": torch.zeros(1, 4, 9, 11)},
        **others,
    )
    image: torch.Tensor = latent["samples"]
    assert image.isfinite().all()
    return image


def _euler(
    number: Callable[[int, int], list[int]],
) -> Callable[..., torch.Tensor]:
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


# --- kinds of runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(("denoise", "size"), [(0.5, (9, 11)), (0.8, (13, 8))])
def test_image_to_image(xl: Pair, denoise: float, size: tuple[int, int]) -> None:
    latent = {"samples": torch.randn(1, 4, *size, generator=torch.Generator().manual_seed(1))}
    assert xl.check(latent=latent, denoise=denoise) == {"full": 3, "shallow": 4}


@pytest.mark.parametrize("cfg", [1.0, 2.0])
def test_four_steps_of_lcm(xl: Pair, cfg: float) -> None:
    def lcm(model: Any) -> Any:
        return xl.node("ModelSamplingDiscrete", model=model, sampling="lcm", zsnr=False)

    sampling = {"sampler": "lcm", "scheduler": "sgm_uniform", "cfg": cfg, "steps": 4}
    assert xl.check(lcm, full={0, 2}, options={"interval": 2}, **sampling) == {
        "full": 2,
        "shallow": 2,
    }


def test_one_step_is_a_full_one(xl: Pair) -> None:
    ours = cached(xl.model, interval=3)
    assert torch.equal(xl.sample(ours, steps=1), xl.sample(xl.model, steps=1))


def _advanced(pair: Pair, model: Any, *parts: tuple[int, int]) -> torch.Tensor:
    """KSamplerAdvanced once for each part of eight steps, with leftover noise in between."""
    latent: Any = {"samples": torch.zeros(2, 4, 8, 9)}
    for number, (start, end) in enumerate(parts):
        latent = pair.node(
            "KSamplerAdvanced",
            model=model,
            add_noise="disable" if number else "enable",
            noise_seed=5,
            steps=8,
            cfg=6.0,
            sampler_name="dpmpp_2m",
            scheduler="karras",
            positive=pair.positive,
            negative=pair.negative,
            latent_image=latent,
            start_at_step=start,
            end_at_step=end,
            return_with_leftover_noise="enable" if end < 8 else "disable",
        )
    image: torch.Tensor = latent["samples"]
    assert image.isfinite().all()
    return image


@pytest.mark.parametrize(
    "parts", [((0, 8),), ((2, 6),), ((0, 4), (4, 8)), ((0, 2), (2, 7), (7, 8))]
)
def test_parts_of_a_schedule_are_runs_of_their_own(
    xl: Pair, parts: tuple[tuple[int, int], ...]
) -> None:
    counts = xl.check(sample=lambda model: _advanced(xl, model, *parts), full={0, 3, 6})
    assert counts["full"] == sum(-(-(end - start) // 3) for start, end in parts)


def test_a_schedule_that_rises(xl: Pair) -> None:
    """FlipSigmas, by which some turn an image into noise."""

    def sample(model: Any) -> torch.Tensor:
        sigmas = xl.node("BasicScheduler", model=model, scheduler="karras", steps=6, denoise=1.0)
        sigmas = xl.node("FlipSigmas", sigmas=sigmas[:-1])
        latent = {"samples": torch.ones(1, 4, 8, 8) * 0.2}
        return sample_custom(xl, model, sigmas=sigmas, latent=latent)

    assert xl.check(sample=sample, full={0, 3}) == {"full": 2, "shallow": 3}


def test_a_split_schedule(xl: Pair) -> None:
    def sample(model: Any) -> torch.Tensor:
        sigmas = xl.node("KarrasScheduler", steps=8, sigma_max=14.6, sigma_min=0.03, rho=7.0)
        first, second = xl.host.node("SplitSigmas", sigmas=sigmas, step=4)
        latent = {"samples": sample_custom(xl, model, sigmas=first)}
        return sample_custom(xl, model, sigmas=second, latent=latent)

    assert xl.check(sample=sample, full={0, 3}) == {"full": 4, "shallow": 4}


GUIDERS: dict[str, Callable[[Pair, Any], Any]] = {
    "basic": lambda p, m: p.node("BasicGuider", model=m, conditioning=p.positive),
    "cfg": lambda p, m: p.node(
        "CFGGuider", model=m, positive=p.positive, negative=p.negative, cfg=5.0
    ),
    "one": lambda p, m: p.node(
        "CFGGuider", model=m, positive=p.positive, negative=p.negative, cfg=1.0
    ),
    **{
        style: lambda p, m, style=style: p.node(
            "DualCFGGuider",
            model=m,
            cond1=p.positive,
            cond2=p.prompt("a red hill " * 30),
            negative=p.negative,
            cfg_conds=5.0,
            cfg_cond2_negative=3.0,
            style=style,
        )
        for style in ("regular", "nested")
    },
    "perpendicular": lambda p, m: p.node(
        "PerpNegGuider",
        model=m,
        positive=p.positive,
        negative=p.negative,
        empty_conditioning=p.prompt(""),
        cfg=5.0,
        neg_scale=0.8,
    ),
}


@pytest.mark.parametrize("guider", GUIDERS)
@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral"])
def test_guiders(xl: Pair, guider: str, sampler: str) -> None:
    def sample(model: Any) -> torch.Tensor:
        latent = xl.node(
            "SamplerCustomAdvanced",
            noise=xl.node("RandomNoise", noise_seed=3),
            guider=GUIDERS[guider](xl, model),
            sampler=xl.node("KSamplerSelect", sampler_name=sampler),
            sigmas=xl.node(
                "BasicScheduler", model=model, scheduler="beta", steps=STEPS, denoise=0.9
            ),
            latent_image={"samples": torch.full((1, 4, 9, 8), 0.1)},
        )
        image: torch.Tensor = latent["samples"]
        assert image.isfinite().all()
        return image

    assert xl.check(sample=sample)["shallow"] % 4 == 0


def test_each_of_two_models_in_one_run_is_itself(xl: Pair, host: Host) -> None:
    """The second one's calls pass through the wrappers of the first."""
    other = Pair(host, "narrowxl")
    other.model = host.load("narrowxl", seed=3)[0]

    def sample(model: Any) -> torch.Tensor:
        guider = xl.node(
            "DualModelGuider",
            model=model,
            model_negative=other.model,
            positive=xl.positive,
            negative=xl.negative,
            cfg=4.0,
        )
        latent = xl.node(
            "SamplerCustomAdvanced",
            noise=xl.node("RandomNoise", noise_seed=3),
            guider=guider,
            sampler=xl.node("KSamplerSelect", sampler_name="euler"),
            sigmas=xl.node(
                "BasicScheduler", model=model, scheduler="normal", steps=STEPS, denoise=1.0
            ),
            latent_image={"samples": torch.zeros(1, 4, 8, 8)},
        )
        image: torch.Tensor = latent["samples"]
        return image

    ours = cached(xl.model, interval=3)
    found = sample(ours)
    assert found.isfinite().all() and not torch.equal(found, sample(xl.model))
    assert evaluations(ours) == {"full": 3, "shallow": 4}  # the first model's alone


# --- calls of a step ------------------------------------------------------------------------------


def _both(pair: Pair, one: Any, other: Any) -> Any:
    return pair.node("ConditioningCombine", conditioning_1=one, conditioning_2=other)


def _area(pair: Pair, conditioning: Any, **place: int) -> Any:
    given = {"width": 40, "height": 48, "x": 0, "y": 0, "strength": 1.2, **place}
    return pair.node("ConditioningSetArea", conditioning=conditioning, **given)


def _mask(pair: Pair, conditioning: Any, area: str) -> Any:
    mask = torch.zeros(1, 72, 88)
    mask[:, 8:, 40:] = 0.8
    return pair.node(
        "ConditioningSetMask",
        conditioning=conditioning,
        mask=mask,
        strength=0.9,
        set_cond_area=area,
    )


def _during(pair: Pair, conditioning: Any, start: float, end: float) -> Any:
    return pair.node(
        "ConditioningSetTimestepRange", conditioning=conditioning, start=start, end=end
    )


SIZE = {"width": 88, "height": 72}
COMBINED: dict[str, tuple[Callable[[Pair], Any], int]] = {
    "tokens": (lambda p: p.prompt("a cat " * 60), 1),
    "many tokens": (lambda p: p.prompt("a cat " * 200), 2),
    "two of them": (lambda p: _both(p, p.positive, p.prompt("a tree")), 1),
    "three of unequal length": (
        lambda p: _both(
            p, _both(p, p.prompt("a tree " * 60), p.prompt("a hill " * 200)), p.positive
        ),
        1,
    ),
    "area": (lambda p: _both(p, p.positive, _area(p, p.prompt("a tree"))), 2),
    "areas of one size": (
        lambda p: _both(
            p,
            _both(p, _area(p, p.prompt("a tree")), _area(p, p.prompt("a sea"), x=48, y=24)),
            p.positive,
        ),
        2,
    ),
    "mask": (lambda p: _both(p, p.positive, _mask(p, p.prompt("a tree"), "default")), 1),
    "mask bounds": (lambda p: _both(p, p.positive, _mask(p, p.prompt("a tree"), "mask bounds")), 2),
    "default": (
        lambda p: p.node(
            "ConditioningSetDefaultCombine",
            cond=_area(p, p.prompt("a tree")),
            cond_DEFAULT=p.prompt("a sea"),
        ),
        2,
    ),
}


@pytest.mark.parametrize("name", COMBINED)
def test_each_call_of_a_step_keeps_its_own(xl: Pair, name: str) -> None:
    make, calls = COMBINED[name]
    counts = xl.check(positive=make(xl), **SIZE)
    assert counts == {"full": 3 * calls, "shallow": 4 * calls}


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.zeros(2, 4, 8, 9)},
        {"x": torch.zeros(4, 4, 8, 8)},
        {"x": torch.zeros(2, 4, 8, 8, dtype=torch.float16)},
        {"x": torch.zeros(2, 4, 8, 8, device="meta")},
        {"context": torch.zeros(2, 154, 64)},
        {"y": None},
        {"control": {"output": [torch.zeros(1), None]}},
        {"options": {"uuids": ["b", "a"], "cond_or_uncond": [1, 0]}},
        {"options": {"uuids": ["a", "b"], "cond_or_uncond": [0, 1]}},
        {"options": {"uuids": ["a"], "cond_or_uncond": [1]}},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_no_other_call_is_taken_for_the_same(changes: dict[str, Any]) -> None:
    call: dict[str, Any] = {
        "x": torch.zeros(2, 4, 8, 8),
        "context": torch.zeros(2, 77, 64),
        "y": torch.zeros(2, 16),
        "control": {"output": [None, torch.zeros(1)]},
        "options": {"uuids": ["a", "b"], "cond_or_uncond": [1, 0]},
    }
    again = {**call, "x": torch.ones(2, 4, 8, 8), "control": {"output": [None, torch.ones(1)]}}
    assert form_of(**again) == form_of(**call)
    assert form_of(**{**call, **changes}) != form_of(**call)


def test_one_call_decides_for_all_of_an_adaptive_step(xl: Pair) -> None:
    """Calls of other areas see other latents, and cond and uncond apart the same one."""
    both = _both(xl, xl.prompt("a cat " * 200), _area(xl, xl.prompt("a tree")))
    ours = cached(xl.model, schedule=Schedule.ADAPTIVE, threshold=0.4)
    sorts: list[Counter[str]] = []

    def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
        before = evaluations(ours)
        result = executor(*args, **kwargs)
        sorts.append(evaluations(ours) - before)
        return result

    ours.add_wrapper_with_key("predict_noise", "tests.sorts", around)
    xl.sample(ours, positive=both, steps=10, **SIZE)
    assert all(len(made) == 1 for made in sorts)
    full = {n for n, made in enumerate(sorts) if "full" in made}
    assert 0 in full and 2 <= len(full) <= 8
    calls = {made.total() for made in sorts}
    assert len(calls) == 1 and calls.pop() > 2


def test_a_conditioning_that_comes_late_and_one_that_goes_take_full_calls(xl: Pair) -> None:
    late = _during(xl, xl.prompt("a tree"), 0.3, 1.0)
    early = _during(xl, xl.prompt("a sea"), 0.0, 0.55)
    sampling = {"positive": _both(xl, _both(xl, xl.positive, late), early), "steps": 10}
    trace = Trace()
    xl.sample(trace.attach(cached(xl.model, interval=10)), **sampling)
    sorts = [sort for event, sort in trace.events if event == "call"]
    assert sorts.count("full") == 3 and sorts[0] == "full"
    assert xl.check(full={0}, options={"interval": 10}, **sampling) == {"full": 3, "shallow": 7}


def test_what_was_not_there_at_the_last_full_step_takes_a_full_call(xl: Pair) -> None:
    """A conditioning is there for some steps around a full one; before and after, calls are of the
    same form, and what is kept from before is older than an interval.
    """
    some = _during(xl, xl.prompt("a tree"), 0.25, 0.55)
    xl.check(positive=_both(xl, xl.positive, some), steps=12, full={0, 3, 6, 9})


@pytest.mark.parametrize(
    "when",
    [
        range(0, 12),
        range(2, 5),
        range(4, 12),
    ],
    ids=str,
)
def test_a_host_short_of_memory_that_splits_calls(
    xl: Pair, when: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cond and uncond apart in some steps, which the host decides anew at each evaluation."""
    import comfy.model_management
    from comfy.patcher_extension import WrappersMP

    plenty, evaluation = comfy.model_management.get_free_memory, -1

    def free(*args: Any, **kwargs: Any) -> Any:
        found = plenty(*args, **kwargs)
        if evaluation not in when:
            return found
        return (1, 1) if isinstance(found, tuple) else 1

    def count(executor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal evaluation
        evaluation += 1
        monkeypatch.setattr(comfy.model_management, "get_free_memory", free)
        try:
            return executor(*args, **kwargs)
        finally:
            monkeypatch.setattr(comfy.model_management, "get_free_memory", plenty)

    def sample(model: Any) -> torch.Tensor:
        nonlocal evaluation
        evaluation = -1
        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "tests.memory", count)
        return xl.sample(clone, steps=12)

    counts = xl.check(sample=sample, full={0, 3, 6, 9})
    assert sum(counts.values()) == 12 + len(when)


# --- what is kept ---------------------------------------------------------------------------------


def test_hires_over_an_upscaled_latent(xl: Pair) -> None:
    def sample(model: Any) -> torch.Tensor:
        first = {"samples": xl.sample(model, width=64, height=72)}
        larger = xl.node(
            "LatentUpscale",
            samples=first,
            upscale_method="nearest-exact",
            width=104,
            height=88,
            crop="disabled",
        )
        return xl.sample(model, latent=larger, denoise=0.5, sampler="dpmpp_2m_sde")

    assert xl.check(sample=sample) == {"full": 6, "shallow": 8}


def test_two_samplers_of_one_prompt(xl: Pair) -> None:
    """Of one size, with the very conditioning: only the run is another."""

    def sample(model: Any) -> torch.Tensor:
        first, second = (xl.sample(model, seed=seed, steps=8) for seed in (3, 4))
        return torch.cat([first, second])

    assert xl.check(sample=sample) == {"full": 6, "shallow": 10}


def test_clones_of_other_settings_by_turns(xl: Pair) -> None:
    settings: list[tuple[dict[str, Any], set[int]]] = [
        ({"interval": 2}, {0, 2, 4, 6}),
        ({"interval": 3, "branch": 2}, {0, 3, 6}),
        ({"interval": 5}, {0, 5}),
    ]
    models = [cached(xl.model, **options) for options, _ in settings]
    models[1] = models[1].clone()  # as every node behind makes one
    for seed in (1, 2):
        for ours, (options, full) in zip(models, settings, strict=True):
            reference = Reference(full, branch=options.get("branch", 0)).attach(xl.model)
            assert torch.equal(xl.sample(ours, seed=seed), xl.sample(reference, seed=seed))
        assert torch.equal(xl.sample(cached(xl.model, interval=1)), xl.sample(xl.model))


class Watch:
    """Weak references to every feature that a DeepCache keeps while it samples."""

    def __init__(self) -> None:
        self.features: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def attach(self, model: Any) -> Any:
        from comfy.patcher_extension import WrappersMP

        cache = cache_of(model)

        def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return executor(*args, **kwargs)
            finally:
                assert cache._run is not None
                kept = cache._run.features._kept
                self.features += [weakref.ref(each.feature) for each in kept]
                self.most = max(self.most, len(kept))

        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "tests.watch", around)
        return clone

    @property
    def alive(self) -> int:
        return sum(feature() is not None for feature in self.features)


@pytest.fixture
def no_collection() -> Any:
    """Memory must go with the last reference, not whenever Python looks for cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_no_feature_outlives_its_run(xl: Pair, no_collection: None) -> None:
    watch = Watch()
    ours = watch.attach(cached(xl.model, interval=3))
    positive = COMBINED["area"][0](xl)
    tensors = []
    for _ in range(2):
        xl.sample(ours, positive=positive, **SIZE)
        assert watch.most == 2 and len(watch.features) > 4
        assert watch.alive == 0
        tensors.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    assert tensors[0] == tensors[1]


def test_no_more_features_are_kept_than_a_step_has_calls(xl: Pair) -> None:
    """Conditioning that comes and goes leaves calls behind that nobody makes any more."""
    positive = xl.positive
    for n in range(1, 6):
        positive = _both(
            xl, positive, _during(xl, xl.prompt(f"tree {n}"), 0.16 * n, 0.16 * n + 0.1)
        )
    watch = Watch()
    xl.sample(watch.attach(cached(xl.model, interval=2)), positive=positive, steps=20)
    assert watch.most <= 2  # the form of this step's call, and one that the last full step had


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("how", ["interrupt", "error"])
def test_what_stops_a_run_leaves_nothing(
    xl: Pair, how: str, at: int, no_collection: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a shallow call and of a full one."""
    import comfy.model_management as management
    from comfy.patcher_extension import WrappersMP

    expected = xl.sample(Reference().attach(xl.model))
    ours = cached(xl.model, interval=3)
    watch, evaluation = Watch(), -1

    def stop(h: torch.Tensor, options: Any) -> torch.Tensor:
        if evaluation == at and options["block"][1] == 0:
            if how == "error":
                raise RuntimeError("on purpose")
            management.interrupt_current_processing(True)  # the host's next layer raises
        return h

    def count(executor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal evaluation
        evaluation += 1
        return executor(*args, **kwargs)

    stopped = watch.attach(ours)
    stopped.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "tests.stop", count)
    stopped.set_model_input_block_patch(stop)
    error = RuntimeError if how == "error" else management.InterruptProcessingException
    with pytest.raises(error):
        xl.sample(stopped)
    assert evaluation == at and watch.features
    gc.collect()  # an exception's frames
    assert watch.alive == 0
    cache = cache_of(ours)
    assert cache._run is None
    assert cache.branch._tap.feature is None and cache.branch._source.feature is None
    assert torch.equal(xl.sample(ours), expected)


def test_unloaded_between_runs(xl: Pair) -> None:
    ours = cached(xl.model, interval=3)
    expected = xl.sample(Reference().attach(xl.model))
    for _ in range(2):
        assert torch.equal(xl.sample(ours), expected)
        xl.host.unload()
    xl.sample(xl.model)
    assert torch.equal(xl.sample(ours), expected)


def test_a_model_that_is_gone_takes_its_cache_with_it(xl: Pair) -> None:
    ours = cached(xl.model, interval=3)
    xl.sample(ours)
    cache = weakref.ref(cache_of(ours))
    del ours
    gc.collect()
    assert cache() is None


def test_one_models_trouble_is_not_anothers(xl: Pair) -> None:
    """A patch that no outer block can follow turns DeepCache off where the patch is, no further."""
    ours = cached(xl.model, interval=3)
    expected = xl.sample(Reference().attach(xl.model))
    unsteady = ours.clone()
    calls = 0

    def drifts(h: torch.Tensor, options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return h * (1 + calls * 1e-3)

    unsteady.set_model_input_block_patch(drifts)
    xl.sample(unsteady)
    assert torch.equal(xl.sample(ours), expected)
