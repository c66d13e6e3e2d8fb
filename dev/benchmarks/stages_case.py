"""The cases of a template's stages: what part of its whole time each is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .lab import BUILD_WORKERS, OFF, Lab
from .stages import TEMPLATES, Pass

RESULTS = Path(__file__).resolve().parent / "results"
Result = dict[str, Any]


def stages(template: str) -> Callable[[Lab], Result]:
    """A case that times a template's stages and sets them beside the transformer's passes, whose
    steps other cases measured.
    """

    def run(lab: Lab) -> Result:
        found = lab.run(
            "stages",
            OFF,
            limit_s=1500 if lab.smoke else 300,
            template=template,
            small=lab.smoke,
            store=lab.store(f"stages-{TEMPLATES[template].vae}"),
            workers=lab.workers(BUILD_WORKERS),
            **({"rounds": 1} if lab.smoke else {}),
        )
        runs = {name: _whole(found["stages"], passes) for name, passes in _runs(template).items()}
        return {
            "meaning": "seconds by the wall clock with every model on the card, medians; a text "
            "encoder's of two of few blocks, drawn out to its depth, its weights in bfloat16; "
            "passes: calls times a sampler's step as the case named in `steps_of` measured it. "
            "Shares of all: eager; with the transformer compiled; with the VAE, too, where it is. "
            "Without loading, reading and writing of files, and a prompt's rewriting by a model",
            **found,
            "runs": runs,
            "lines": [line for name, run in runs.items() for line in _lines(name, run)],
        }

    return run


def _runs(template: str) -> dict[str, tuple[list[Result], dict[str, str]]]:
    """Each run's passes as stages, and which card each case measured them on."""
    return {
        name: ([_passes(each) for each in passes], {each.case: _card(each) for each in passes})
        for name, passes in TEMPLATES[template].runs.items()
    }


def _passes(each: Pass) -> Result:
    row = _case(each.case)["rows"][each.row]
    eager, ours = (row[form]["step_ms"]["median"] / 1000.0 for form in ("eager", "ours"))
    return {
        "name": each.name,
        "calls": each.calls,
        "seconds": round(eager, 4),
        "transformer_seconds": round(ours, 4),
        "row": each.row,
    }


def _card(each: Pass) -> str:
    return str(_case(each.case)["gpu"])


def _case(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _whole(measured: list[Result], passes: tuple[list[Result], dict[str, str]]) -> Result:
    """Seconds and shares of each stage, and of all."""
    steps, cards = passes
    columns: dict[str, dict[str, float]] = {"eager": {}, "transformer_compiled": {}, "compiled": {}}
    for stage in [*steps, *measured]:
        eager = stage["seconds"]
        transformer = stage.get("transformer_seconds", eager)
        each = (eager, transformer, stage.get("compiled_seconds", transformer))
        for column, seconds in zip(columns.values(), each, strict=True):
            column[stage["name"]] = round(stage["calls"] * seconds, 4)
    wholes = {name: sum(column.values()) for name, column in columns.items()}
    return {
        "steps_of": cards,
        "passes": steps,
        "seconds": {name: round(whole, 3) for name, whole in wholes.items()},
        "stage_seconds": columns,
        "shares": {
            name: {stage: round(value / wholes[name], 4) for stage, value in column.items()}
            for name, column in columns.items()
        },
    }


def _lines(name: str, run: Result) -> list[str]:
    whole, shares = run["seconds"], run["shares"]
    return [
        f"{name}: {whole['eager']} s, transformer compiled {whole['transformer_compiled']} s, "
        f"all that is served {whole['compiled']} s",
        *(
            f"  {stage}: {run['stage_seconds']['eager'][stage]} s, {share:.1%}, then "
            f"{shares['transformer_compiled'][stage]:.1%}, then {shares['compiled'][stage]:.1%}"
            for stage, share in shares["eager"].items()
        ),
    ]
