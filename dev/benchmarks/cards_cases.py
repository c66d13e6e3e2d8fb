"""The case of several cards: the host's split, alone and with ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .figure import Figure
from .lab import BUILD_WORKERS, DEFAULT, Lab

Result = dict[str, Any]
#: By the kind, the guidance that its images are made with.
SPLIT = {"sdxl": 7.0, "flux1": 4.0}


def multigpu_split(kind: str) -> Callable[[Lab], Result]:
    """A case that times a step on one card and on two, with ours and without, by turns."""

    def run(lab: Lab) -> Result:
        result = lab.run(
            "multigpu_split",
            DEFAULT,
            limit_s=3000 if lab.smoke else 500,
            model=lab.file(kind),
            kind=lab.kind(kind),
            store=lab.store(kind),
            size=lab.pixels(1024, 1024),
            cfg=SPLIT[kind],
            workers=lab.workers(BUILD_WORKERS),
            **({"rounds": 1, "steps": 8} if lab.smoke else {}),
        )
        return {
            "meaning": "speedup: the split alone / the split with ours; vs_one: one card with ours "
            "/ two; a sampler's step by the wall clock, waited for, medians by turns",
            **result,
            "lines": [
                f"{kind}, cfg {SPLIT[kind]:g}: {result['step_ms']} ms, split x{result['speedup']}, "
                f"two cards x{result['vs_one']} of one, rel L2 {result['rel_l2']:.1e}, "
                f"{result['cards']}, VRAM {result['vram_mib']} MiB"
            ],
        }

    return run


CARDS_FIGURES = {
    f"multigpu_split_{name}": Figure(
        f"{beside} / split with ours",
        tuple(f"multigpu_split_{kind}" for kind in SPLIT),
        lambda *cases, key=key: min(case[key] for case in cases),
        bar,
        any_of=True,
    )
    for name, key, beside, bar in (
        ("speedup", "speedup", "split alone", ">= 1.3"),
        ("vs_one_card", "vs_one", "one card with ours", ">= 1.25"),
    )
}
