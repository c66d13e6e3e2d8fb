"""The cases of DeepCache: images of 20 steps at interval 3, with and without Compile Model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .lab import BUILD_WORKERS, Lab

Result = dict[str, Any]
SIDES = {"sdxl": 1024, "sd15": 512}


def deepcache(kind: str, flags: tuple[str, ...]) -> Callable[[Lab], Result]:
    """A case that times whole KSampler nodes of one kind at the size that it is made for."""

    def run(lab: Lab) -> Result:
        quick = {"images": 1, "steps": 4} if lab.smoke else {}
        result = lab.run(
            "deepcache",
            flags,
            limit_s=1500 if lab.smoke else 300,
            model=lab.model(kind),
            kind=lab.kind(kind),
            store=lab.store(kind),
            size=lab.pixels(SIDES[kind], SIDES[kind]),
            workers=lab.workers(BUILD_WORKERS),
            **quick,
        )
        lines = [
            f"KSampler {result['ksampler_seconds']} s, speedups {result['speedups']}",
            f"interval 1 differs by {result['max_abs_diff_interval1']}, compiled "
            f"{result['rel_l2_compiled']}, {result['builds_by_deepcache']} builds by DeepCache, "
            f"saved {result['reports']['deepcache']['deepcache']['seconds_saved']} s and "
            f"{result['reports']['both']['deepcache']['seconds_saved']} s, not replayed "
            f"{result['reports']['both']['captured']['not_replayed']}",
        ]
        return {**result, "interval": 3, "lines": lines}

    return run
