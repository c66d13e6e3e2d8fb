"""The cases of models that are learned from a step: those that no family describes, and described
ones without what is written of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .figure import Figure
from .lab import BUILD_WORKERS, DEFAULT, Lab

Result = dict[str, Any]


class Row(NamedTuple):
    """A model, a size as `transformers.sample` takes it, and whether a family describes it."""

    kind: str
    size: tuple[int, ...]
    written: bool = False


#: By the case's name.
LEARNED = {
    "aura": Row("aura", (1024, 1024, 1)),
    "kandinsky": Row("kandinsky", (768, 512, 9)),
    "omnigen": Row("omnigen", (1024, 1024, 1)),
    "zimage": Row("zimage", (1024, 1024, 1), written=True),
    "flux1_fp8": Row("flux1_fp8", (1024, 1024, 1), written=True),
    "qwen": Row("qwen", (1328, 1328, 1), written=True),
    "wan1_3b": Row("wan1_3b", (832, 480, 9), written=True),
    "ltx23_few_fp8": Row("ltx23_few_fp8", (1280, 704, 16), written=True),
}
SOAK = ("aura", "kandinsky", "omnigen")
SOAK_PROMPTS = 300
#: Whose blocks' calls are timed on the processor.
DISPATCHED = "aura"


def learned(name: str) -> Callable[[Lab], Result]:
    """A case of eager, what is learned, and what is written, by turns."""
    row = LEARNED[name]

    def run(lab: Lab) -> Result:
        result = lab.run(
            "learned",
            DEFAULT,
            limit_s=3000 if lab.smoke else 400,
            name=lab.kind(row.kind),
            path=lab.transformer(row.kind),
            store=lab.store(f"learned-{row.kind}", empty=True),
            size=[*lab.pixels(*row.size[:2]), *row.size[2:]],
            written=row.written,
            workers=lab.workers(BUILD_WORKERS),
            **({"rounds": 1, "steps": 3} if lab.smoke else {}),
        )
        medians = {form: times["median"] for form, times in result["step_ms"].items()}
        return {
            "meaning": "speedup: eager / learned, vs_written: written / learned, a sampler's whole "
            "step by the GPU's clock, medians by turns in one process; watched_ms: a run's first "
            "step, which is watched, eager_ms: the steps of such a run before it",
            **result,
            "lines": [
                f"{row.kind} {row.size}: {medians} ms, x{result['speedup']}, of what is written "
                f"x{result.get('vs_written')}, rel L2 {result['rel_l2']:.1e}, ready in "
                f"{result['ready_seconds']} s, watched {result['watched_ms']:.0f} ms, eager "
                f"{result['eager_ms']}, {result['report']['regions']}"
            ],
        }

    return run


def learned_soak(lab: Lab) -> Result:
    """Prompts drawn from a seed by what was learned of small models, beside eager's."""
    result = lab.run(
        "learned_soak",
        DEFAULT,
        limit_s=3000 if lab.smoke else 500,
        names=[f"small_{name}" for name in SOAK],
        store=lab.store("learned-soak", empty=True),
        seed=5,
        prompts=8 if lab.smoke else SOAK_PROMPTS,
        scale=8 if lab.smoke else 1,
        workers=lab.workers(BUILD_WORKERS),
    )
    return {
        "meaning": "wrong: prompts whose last latent is not eager's",
        **result,
        "lines": [
            f"{result['prompts']} prompts: {len(result['wrong'])} wrong, worst relative L2 "
            f"{result['worst']:.1e}, {result['builds']} builds, {result['regions']}"
        ],
    }


def block_dispatch(lab: Lab) -> Result:
    """What our own code costs the processor at each learned block, without CUDA graphs."""
    row = LEARNED[DISPATCHED]
    result = lab.run_in_modes(
        "block_dispatch",
        limit_s=3000 if lab.smoke else 400,
        name=lab.kind(row.kind),
        path=lab.transformer(row.kind),
        store=lab.store(f"learned-{row.kind}"),
        size=[*lab.pixels(*row.size[:2]), *row.size[2:]],
        workers=lab.workers(BUILD_WORKERS),
    )
    lines = [
        f"{name}: {row.kind}, {found['blocks']} blocks, {found['median_us']} us each beyond their "
        f"graphs, worst {found['worst_us']} us, {found['sorts']}"
        for name, found in result.items()
    ]
    return {**result, "lines": lines}


def _cases(*, written: bool) -> tuple[str, ...]:
    return tuple(f"learned_{name}" for name, row in LEARNED.items() if row.written == written)


def _beyond(case: dict[str, Any]) -> float:
    """What a run's first step took beyond eager's, in ms, for it was watched."""
    return round(float(case["watched_ms"]) - float(case["eager_ms"][0]), 1)


LEARNED_FIGURES = {
    "learned_speedup_smallest": Figure(
        "eager / learned",
        _cases(written=False),
        lambda *cases: min(case["speedup"] for case in cases),
        ">= 1.15",
        any_of=True,
    ),
    "learned_vs_written_slowest": Figure(
        "written / learned",
        _cases(written=True),
        lambda *cases: min(case["vs_written"] for case in cases),
        ">= 0.98",
        any_of=True,
    ),
    "learned_wrong": Figure("prompts", ("learned_soak",), lambda case: len(case["wrong"]), "== 0"),
    "learned_dispatch_us_per_block": Figure(
        "us", ("learned_dispatch",), lambda case: case["off"]["median_us"], "<= 45"
    ),
    "learned_dispatch_us_per_block_default_host": Figure(
        "us", ("learned_dispatch",), lambda case: case["default"]["median_us"], "<= 45"
    ),
    "learned_prompt_thread_ms": Figure(
        "ms beyond an eager step",
        (*_cases(written=False), *_cases(written=True)),
        lambda *cases: max(map(_beyond, cases)),
        "<= 30",
        any_of=True,
    ),
}
