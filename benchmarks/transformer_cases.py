"""The cases of diffusion transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .lab import BUILD_WORKERS, DEFAULT, Lab

Result = dict[str, Any]

#: Pixels, and frames of the latent: 33 and 81 frames of a video are 9 and 21 there.
SIZES = {
    "zimage": ((1024, 1024, 1), (512, 512, 1)),
    "flux1": ((1024, 1024, 1), (512, 512, 1)),
    "klein4b": ((1024, 1024, 1), (512, 512, 1)),
    "qwen": ((1328, 1328, 1),),
    "krea2": ((1024, 1024, 1),),
    "wan1_3b": ((832, 480, 9),),
    "wan14b": ((832, 480, 21),),
}

#: Of which one call takes seconds.
LONG = ("wan14b",)


def transformer(name: str, flags: tuple[str, ...] = DEFAULT) -> Callable[[Lab], Result]:
    """A case that times a model at full size: eager, ours, and each block by `torch.compile`."""

    def run(lab: Lab) -> Result:
        sizes = [[*lab.pixels(width, height), n] for width, height, n in SIZES[name]]
        quick = {"rounds": 1, "steps": 3} if lab.smoke or name in LONG else {}
        result = lab.run(
            "transformer",
            flags,
            limit_s=3000 if lab.smoke else 590,
            name=name,
            path=str(lab.work / "models" / f"{name}-bfloat16-0.safetensors"),
            small=lab.smoke,
            store=lab.store(f"transformer-{name}", empty=not lab.smoke),
            sizes=sizes,
            workers=lab.workers(BUILD_WORKERS),
            **quick,
        )
        lines = [
            f"ready in {result['ready_seconds']} s, {result['builds']} builds, "
            f"{result['disk_mb']} MB, regions {result['report']['regions']}",
            *(
                f"{size}: eager {row['eager']['step_ms']['median']} ms, ours "
                f"{row['ours']['step_ms']['median']} ms, x{row['speedup']}, per block "
                f"x{row.get('vs_per_block_torch_compile')} of ours, rel L2 "
                f"{max(row['rel_l2']):.1e}"
                for size, row in result["rows"].items()
            ),
            *(f"{form} FAILED: {why[:200]}" for form, why in result.get("failed", {}).items()),
        ]
        return {
            "meaning": "speedup: eager / ours, a sampler's whole step by the GPU's clock, medians "
            "by turns in one process; per block: `torch.compile` of each block by the host's "
            "helper, dynamic VRAM off for it; rel L2: of each call against eager's",
            **result,
            "lines": lines,
        }

    return run
