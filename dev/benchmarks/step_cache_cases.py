"""The cases of Step Cache: whole sampler runs with it, beside Compile Model alone and eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .figure import Figure
from .lab import BUILD_WORKERS, Lab

Result = dict[str, Any]
#: Transformers that are timed, a UNet, and the sides of their images.
TRANSFORMERS, UNET = {"flux1": 1024, "zimage": 1024}, {"sdxl": 1024}
KINDS = {**TRANSFORMERS, **UNET}


def step_cache(kind: str) -> Callable[[Lab], Result]:
    """A case of one kind of model."""

    def case(lab: Lab) -> Result:
        result = lab.run(
            "forecast_steps",
            limit_s=1500 if lab.smoke else 300,
            kind=lab.kind(kind),
            model=lab.file(kind),
            size=lab.pixels(KINDS[kind], KINDS[kind]),
            store=lab.store(kind),
            workers=lab.workers(BUILD_WORKERS),
        )
        medians = result["medians"]
        return {
            "meaning": "speedup: Compile Model alone / Step Cache behind it, seconds of a whole "
            "KSampler run, medians by turns in one process, each after a short run of its own; "
            "total: eager / Step Cache behind it",
            **result,
            "lines": [
                f"{kind}: {result['computed']} of {result['steps']} steps computed, {medians} s, "
                f"x{result['speedup']}, over eager x{result['total_speedup']}, replayed "
                f"{result['replayed']}, rel L2 to all steps {result['rel_l2']:.1e}"
            ],
        }

    return case


def psnr(case: Result, way: str, model: str, sampler: str, speed: float) -> float:
    """PSNR in dB to the run that computes every step, of one way as `quality` measured it."""
    wanted = (model, sampler, way, speed)
    (found,) = (
        float(row["psnr"])
        for row in case["rows"]
        if (row["model"], row["sampler"], row["way"], row["speed"]) == wanted
    )
    return found


def _least(case: Result, way: str) -> float:
    """Of the digits by samplers that add no noise, half of the steps computed."""
    return min(psnr(case, way, "digits", each, 2.0) for each in SMOOTH)


def _lead(case: Result, over: str, model: str, samplers: Sequence[str], *speeds: float) -> float:
    """By how many dB the default is closer than another way, where it is least so."""
    pairs = [(sampler, speed) for sampler in samplers for speed in speeds]
    return min(psnr(case, "auto", model, *each) - psnr(case, over, model, *each) for each in pairs)


#: Samplers that add no noise, and such as do.
SMOOTH, NOISY = ("euler", "dpmpp_2m"), ("er_sde", "euler_ancestral")
QUALITY = ("step_cache_quality",)
CASES = tuple(f"step_cache_{kind}" for kind in KINDS)
STEP_CACHE_FIGURES = {
    "step_cache_speedup_24_steps": Figure(
        "Compile Model / with Step Cache",
        tuple(f"step_cache_{kind}" for kind in TRANSFORMERS),
        lambda *cases: min(case["speedup"] for case in cases),
        ">= 1.9",
        any_of=True,
    ),
    "step_cache_flux1_total_speedup": Figure(
        "eager / ours", ("step_cache_flux1",), lambda case: case["total_speedup"], ">= 2.6"
    ),
    "step_cache_new_captures": Figure(
        "captures",
        CASES,
        lambda *cases: max(max(case["new_captures"].values()) for case in cases),
        "== 0",
        any_of=True,
    ),
    # Two small trained transformers, 24 steps, against the run that computes them all.
    **{
        f"step_cache_digits_{way}_psnr_db": Figure(
            "dB", QUALITY, lambda case, way=way: _least(case, way), bar
        )
        for way, bar in (("auto", ">= 43"), ("half", ">= 43"), ("line", ">= 48"))
    },
    "step_cache_digits_over_easycache_db": Figure(
        "dB", QUALITY, lambda case: _lead(case, "EasyCache", "digits", SMOOTH, 2.0), ">= 3"
    ),
    "step_cache_digits_over_fewer_steps_db": Figure(
        "dB", QUALITY, lambda case: _lead(case, "fewer steps", "digits", SMOOTH, 2.0), ">= 6"
    ),
    "step_cache_digits_noisy_over_easycache_db": Figure(
        "dB", QUALITY, lambda case: _lead(case, "EasyCache", "digits", NOISY, 2.0), ">= 0"
    ),
    "step_cache_emoji_over_easycache_db": Figure(
        "dB",
        QUALITY,
        lambda case: _lead(case, "EasyCache", "emoji", (*SMOOTH, *NOISY), 1.8, 2.4),
        ">= 0",
    ),
}
