"""Step Cache beside guidance that makes calls of its own, comes and goes, or takes two models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from ..deepcache.cached import Pair, changed
from ..deepcache.sampling import step_of
from ..deepcache.test_runs import GUIDERS
from .small import Small
from .stepped import STEPS, Reference, check

SLOW = pytest.mark.slow


def guided(pair: Pair, guider: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
    """A way to sample by a guider of a model's."""

    def sample(model: Any, **_: Any) -> torch.Tensor:
        latent = pair.node(
            "SamplerCustomAdvanced",
            noise=pair.node("RandomNoise", noise_seed=3),
            guider=guider(model),
            sampler=pair.node("KSamplerSelect", sampler_name="euler"),
            sigmas=pair.node(
                "BasicScheduler", model=model, scheduler="normal", steps=STEPS, denoise=1.0
            ),
            latent_image={"samples": torch.zeros(1, 4, 8, 9)},
        )
        image: torch.Tensor = latent["samples"]
        assert image.isfinite().all()
        return image

    return sample


# --- calls of a node's own ------------------------------------------------------------------------


@pytest.mark.parametrize("words", [4, pytest.param(400, marks=SLOW)])
def test_self_attention_guidance(xl: Pair, words: int) -> None:
    """It blurs the denoised latent where attention was in the last computed step, and asks for the
    negative of that: another latent than the sampler's.
    """
    patch = xl.patch("SelfAttentionGuidance", scale=0.8, blur_sigma=2.0)
    counts = check(xl, patch, positive=xl.prompt("cat " * words))
    assert counts == {"full": 14, "forecast": 10}


SKIPPING: dict[str, dict[str, Any]] = {
    "SkipLayerGuidanceDiT": {
        "double_layers": "1",
        "single_layers": "0",
        "scale": 3.0,
        "rescaling_scale": 0.5,
    },
    "SkipLayerGuidanceDiTSimple": {"double_layers": "0", "single_layers": "1"},
    "SkipLayerGuidanceSD3": {"layers": "1", "scale": 3.0},
}


def _skipping(kind: str, node: str) -> Any:
    is_often = kind == ("sd3" if node == "SkipLayerGuidanceSD3" else "flux1")
    return pytest.param(kind, node, marks=[] if is_often else SLOW)


@pytest.mark.parametrize(
    ("kind", "node"),
    [_skipping(kind, node) for kind in ("flux1", "wan", "sd3") for node in SKIPPING],
)
def test_skipped_layers(host: Host, kind: str, node: str) -> None:
    """Two calls in each evaluation: of one conditioning twice, or of each by itself."""
    small = Small(host, kind)
    patch = small.patch(node, **SKIPPING[node], start_percent=0.0, end_percent=1.0)
    reference = Reference(is_flow=True)
    assert check(small, patch, reference=reference, cfg=4.0) == {"full": 14, "forecast": 10}


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("SkipLayerGuidanceDiT", {"full": 4 + 2, "forecast": 8 + 3}),
        ("SkipLayerGuidanceDiTSimple", {"full": 4 + 2 * 2, "forecast": 3 + 2 * 3}),
    ],
)
def test_layers_that_are_skipped_in_a_part_of_the_run(
    host: Host, node: str, expected: dict[str, int]
) -> None:
    """From the fifth step to the ninth: what it begins to ask for is computed twice first."""
    small = Small(host, "flux1")
    patch = small.patch(node, **SKIPPING[node], start_percent=0.3, end_percent=0.8)
    full = {0, 1, 2, 11}
    counts = check(small, patch, full=full, reference=Reference(full, is_flow=True), cfg=4.0)
    assert counts == expected


# --- that changes in a run ------------------------------------------------------------------------


def test_guidance_of_another_strength_in_a_part_of_the_run(xl: Pair) -> None:
    patch = xl.patch("CFGOverride", cfg=3.0, start_percent=0.2, end_percent=0.6)
    assert check(xl, patch) == {"full": 7, "forecast": 5}


def test_guidance_that_is_off_in_a_part_of_the_run(xl: Pair) -> None:
    """Without the negative it is another call."""
    patch = xl.patch("CFGOverride", cfg=1.0, start_percent=0.3, end_percent=0.7)
    assert 2 < step_of(xl, 0.3, STEPS) < step_of(xl, 0.7, STEPS) - 2 < 8
    assert check(xl, patch, full={0, 1, 2, 11}) == {"full": 4 + 2, "forecast": 6}


def test_a_post_guidance_that_counts_its_calls(xl: Pair) -> None:
    """It is called in forecast steps as in others."""

    def patch(model: Any) -> Any:
        calls = iter(range(1000))

        def weaker(args: dict[str, Any]) -> torch.Tensor:
            part = 1.0 - 0.5 * (next(calls) % STEPS) / STEPS
            by = args["denoised"] - args["uncond_denoised"]
            result: torch.Tensor = args["uncond_denoised"] + part * by
            return result

        return changed(lambda clone: clone.set_model_sampler_post_cfg_function(weaker))(model)

    assert check(xl, patch) == {"full": 7, "forecast": 5}


# --- guiders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["regular", "nested"])
def test_guidance_of_two_prompts(xl: Pair, style: str) -> None:
    """Three roles in one call, and a guider of its own."""
    sample = guided(xl, lambda model: GUIDERS[style](xl, model))
    assert check(xl, sample=sample) == {"full": 7, "forecast": 5}


def test_two_models_in_each_evaluation(xl: Pair, host: Host) -> None:
    """One for the positive, one for the negative; Step Cache of the first is around both."""
    other, _, _ = host.load("narrowxl", seed=3)

    def guider(model: Any) -> Any:
        prompts = {"positive": xl.positive, "negative": xl.negative}
        return xl.node("DualModelGuider", model=model, model_negative=other, cfg=4.0, **prompts)

    assert check(xl, sample=guided(xl, guider)) == {"full": 14, "forecast": 10}


def test_another_model_in_the_middle_of_a_run_is_computed_anew(xl: Pair, host: Host) -> None:
    """By a guider that goes on with a second one, of the same prompts."""
    from comfy.samplers import CFGGuider, sampling_function

    other, _, _ = host.load("narrowxl", seed=3)
    second = other.model
    sigma = xl.model.model.model_sampling.percent_to_sigma(0.4)

    class Switching(CFGGuider):
        def predict_noise(
            self, x: Any, timestep: Any, model_options: Any = None, seed: Any = None
        ) -> Any:
            model = self.inner_model if float(timestep[0]) > sigma else second
            negative, positive = self.conds["negative"], self.conds["positive"]
            return sampling_function(
                model, x, timestep, negative, positive, 4.0, model_options, seed=seed
            )

    def guider(model: Any) -> Any:
        second.current_patcher = other
        made = Switching(model)
        made.set_conds(xl.positive, xl.negative)
        return made

    step = step_of(xl, 0.4, STEPS)
    counts = check(xl, sample=guided(xl, guider), full={0, 1, 2, 11})
    assert 2 < step < 10 and counts == {"full": 6, "forecast": 6}
