"""How tests of DeepCache sample: traced runs, samplers of their own, conditionings that are joined,
placed or timed.
"""

from __future__ import annotations

from typing import Any

import torch

from .cached import STEPS, Pair

#: Of images that areas and masks lie in.
SIZE = {"width": 88, "height": 72}


class Trace:
    """What a sampler does in order: ("call", sort of its evaluation) and ("back", number)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def attach(self, model: Any) -> Any:
        """Return a clone that is traced, with the sorts of the DeepCache it carries, if any."""
        from comfy.patcher_extension import WrappersMP

        from warmgraph_backends.attaching.deepcache import carried

        cache = carried(model)

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


def both(pair: Pair, one: Any, other: Any) -> Any:
    return pair.node("ConditioningCombine", conditioning_1=one, conditioning_2=other)


def area(pair: Pair, conditioning: Any, **place: int) -> Any:
    given = {"width": 40, "height": 48, "x": 0, "y": 0, "strength": 1.2, **place}
    return pair.node("ConditioningSetArea", conditioning=conditioning, **given)


def during(pair: Pair, conditioning: Any, start: float, end: float) -> Any:
    return pair.node(
        "ConditioningSetTimestepRange", conditioning=conditioning, start=start, end=end
    )


def step_of(pair: Pair, percent: float, steps: int) -> int:
    """The first step of a run that is past a part of it."""
    sampling = pair.model.model.model_sampling
    sigma = sampling.percent_to_sigma(percent)
    sigmas = pair.node(
        "BasicScheduler", model=pair.model, scheduler="normal", steps=steps, denoise=1.0
    )
    return next(n for n, each in enumerate(sigmas.tolist()) if each <= sigma)
