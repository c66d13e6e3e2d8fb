"""DeepCache in all sorts of runs: a part of a schedule, image to image, guiders, two models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .cached import STEPS, Pair, cached, evaluations
from .sampling import sample_custom

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("denoise", "size"), [(0.5, (9, 11)), pytest.param(0.8, (13, 8), marks=SLOW)]
)
def test_image_to_image(xl: Pair, denoise: float, size: tuple[int, int]) -> None:
    latent = {"samples": torch.randn(1, 4, *size, generator=torch.Generator().manual_seed(1))}
    assert xl.check(latent=latent, denoise=denoise) == {"full": 3, "shallow": 4}


@pytest.mark.parametrize("cfg", [2.0, pytest.param(1.0, marks=SLOW)])
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
    image: torch.Tensor = pair.host.sample_parts(
        model,
        pair.positive,
        pair.negative,
        parts,
        steps=8,
        latent={"samples": torch.zeros(2, 4, 8, 9)},
        sampler="dpmpp_2m",
        scheduler="karras",
    )
    assert image.isfinite().all()
    return image


@pytest.mark.parametrize(
    "parts",
    [
        *(((2, 6),), ((0, 2), (2, 7), (7, 8))),
        *(pytest.param(parts, marks=SLOW) for parts in (((0, 8),), ((0, 4), (4, 8)))),
    ],
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
@pytest.mark.parametrize("sampler", ["euler", pytest.param("euler_ancestral", marks=SLOW)])
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
