"""Ways to sample: what the host's own sampling nodes ask of a compiled model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative
from .rows import some_rows
from .subject import Subject, reasons


@pytest.fixture(scope="module")
def xl(lab: Lab, host: Host) -> Subject:
    return Subject(lab, host, "narrowxl")


def _all_compiled(report: dict[str, Any]) -> bool:
    return not reasons(report) and not report["misses"]


def test_img2img_of_an_odd_size(xl: Subject) -> None:
    image = torch.rand(1, 104, 72, 3, generator=torch.Generator().manual_seed(3))
    (latent,) = xl.host.node("VAEEncode", vae=xl.vae, pixels=image)
    assert latent["samples"].shape[2:] == (13, 9)
    assert _all_compiled(xl.check(latent=latent, denoise=0.6, steps=3))


@pytest.mark.parametrize("method", some_rows(["nearest-exact", "bislerp"], ["bislerp"]))
def test_two_pass_hires_over_an_upscaled_latent(xl: Subject, method: str) -> None:
    results = []
    for model in (xl.model, xl.compiled):
        first = {"samples": xl.sample(model, width=72, height=56)}
        (larger,) = xl.host.node(
            "LatentUpscale",
            samples=first,
            upscale_method=method,
            width=136,
            height=104,
            crop="disabled",
        )
        results.append(xl.sample(model, latent=larger, denoise=0.5, steps=3))
    eager, ours = results
    assert ours.shape[2:] == (13, 17) and relative(ours, eager) < TOLERANCE
    assert _all_compiled(xl.report(xl.compiled))


@pytest.mark.parametrize(
    "sampler", some_rows(["lcm", "euler_ancestral", "dpmpp_2m", "heun"], ["lcm", "heun"])
)
def test_samplers_at_cfg_1_halve_the_batch(xl: Subject, sampler: str) -> None:
    scheduler = "sgm_uniform" if sampler == "lcm" else "karras"
    report = xl.check(sampler=sampler, scheduler=scheduler, cfg=1.0, steps=3)
    assert _all_compiled(report)


def test_lcm_sampling_through_the_model_sampling_node(xl: Subject) -> None:
    def lcm(model: Any) -> Any:
        return xl.host.node("ModelSamplingDiscrete", model=model, sampling="lcm", zsnr=False)[0]

    assert _all_compiled(xl.check(lcm, sampler="lcm", scheduler="sgm_uniform", cfg=1.0))


def test_area_conditioning_adds_calls_of_other_sizes(xl: Subject) -> None:
    sky = xl.host.encode(xl.clip, "a red sky")
    (area,) = xl.host.node(
        "ConditioningSetArea", conditioning=sky, width=72, height=40, x=24, y=8, strength=1.5
    )
    (both,) = xl.host.node("ConditioningCombine", conditioning_1=xl.positive, conditioning_2=area)
    plain = xl.sample(xl.model, width=104, height=72)
    changed = xl.sample(xl.model, width=104, height=72, positive=both)
    assert relative(changed, plain) > 1e-3
    assert _all_compiled(xl.check(positive=both, width=104, height=72))


def test_mask_and_timestep_range_conditioning(xl: Subject) -> None:
    mask = torch.zeros(1, 64, 64)
    mask[:, :, 32:] = 1.0
    (masked,) = xl.host.node(
        "ConditioningSetMask",
        conditioning=xl.host.encode(xl.clip, "a tree"),
        mask=mask,
        strength=1.0,
        set_cond_area="default",
    )
    (early,) = xl.host.node("ConditioningSetTimestepRange", conditioning=masked, start=0.0, end=0.5)
    (both,) = xl.host.node("ConditioningCombine", conditioning_1=xl.positive, conditioning_2=early)
    assert _all_compiled(xl.check(positive=both, steps=3))


def test_a_prompt_of_five_times_the_others_length(xl: Subject) -> None:
    """It runs as two calls, not padded."""
    positive = xl.host.encode(xl.clip, "cat " * 350)
    assert positive[0][0].shape[1] == 385
    assert _all_compiled(xl.check(positive=positive))


def test_inpainting_with_a_noise_mask(xl: Subject) -> None:
    mask = torch.zeros(1, 64, 64)
    mask[:, 16:48, 16:48] = 1.0
    latent = {"samples": torch.full((1, 4, 8, 8), 0.3)}
    (latent,) = xl.host.node("SetLatentNoiseMask", samples=latent, mask=mask)
    assert _all_compiled(xl.check(latent=latent, steps=3))


def test_a_run_in_two_halves_through_the_advanced_sampler(xl: Subject) -> None:
    (empty,) = xl.host.node("EmptyLatentImage", width=64, height=64, batch_size=2)
    results = []
    for model in (xl.model, xl.compiled):
        given = {"parts": ((0, 2), (2, 4)), "steps": 4, "latent": empty}
        results.append(xl.host.sample_parts(model, xl.positive, xl.negative, **given))
    assert relative(results[1], results[0]) < TOLERANCE


def test_a_compiled_and_an_uncompiled_branch_take_turns(xl: Subject) -> None:
    eager = xl.sample(xl.model)
    ours = xl.sample(xl.compiled)
    assert torch.equal(xl.sample(xl.model), eager)  # nothing stays behind on the shared weights
    assert torch.equal(xl.sample(xl.compiled), ours)
    assert not torch.equal(ours, eager)
    assert not any("forward" in module.__dict__ for module in xl.unet.modules())
