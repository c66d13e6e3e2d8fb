"""The cases of Step Cache: whole sampler runs with it, beside Compile Model alone and eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .figure import Figure
from .lab import BUILD_WORKERS, Lab

Result = dict[str, Any]
#: Kinds of models that are timed, and the sides of their images.
KINDS = {"flux1": 1024, "zimage": 1024, "sdxl": 1024}


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
            "KSampler run, medians by turns in one process; total: eager / Step Cache behind it",
            **result,
            "lines": [
                f"{kind}: {result['computed']} of {result['steps']} steps computed, {medians} s, "
                f"x{result['speedup']}, over eager x{result['total_speedup']}, replayed "
                f"{result['replayed']}, rel L2 to all steps {result['rel_l2']:.1e}"
            ],
        }

    return case


CASES = tuple(f"step_cache_{kind}" for kind in KINDS)
STEP_CACHE_FIGURES = {
    "step_cache_speedup_24_steps": Figure(
        "Compile Model / with Step Cache",
        CASES,
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
}
