"""The case of a video VAE."""

from __future__ import annotations

from typing import Any

from .lab import BUILD_WORKERS, Lab
from .part_cases import BF16_VAE

DIM, NARROW_DIM = 96, 8


def video_vae(lab: Lab) -> dict[str, Any]:
    """Decode and encode short videos by Wan 2.1's VAE in bf16, eager and ours in one process."""
    width, height = lab.pixels(832, 480)
    short, long = (5, 9) if lab.smoke else (17, 33)
    quick = {"rounds": 1} if lab.smoke else {}
    result = lab.run(
        "video_vae",
        BF16_VAE,
        limit_s=1500 if lab.smoke else 300,
        dim=NARROW_DIM if lab.smoke else DIM,
        # A smoke run builds for minutes: its second run takes what is there.
        store=lab.store("video-vae", empty=not lab.smoke),
        sizes=[
            [work, width, height, frames]
            for work in ("decode", "encode")
            for frames in (short, long)
        ],
        peak=[width, height, short],
        exact=[width, height, 5],
        workers=lab.workers(BUILD_WORKERS),
        **quick,
    )
    peaks, shares = result["peak_mib"], result["profile"]["eager"]["shares"]
    lines = [
        f"{result['build_seconds']} s, {result['builds']} builds, {result['graphs']} graphs, "
        f"{result['disk_mb']} MB, regions {result['report']['regions']}",
        *(
            f"{name}: eager {row['eager']['model_ms']['median']} ms, ours "
            f"{row['ours']['model_ms']['median']} ms, x{row['speedup']}, whole call "
            f"x{row['call_speedup']}, rel L2 {row['rel_l2']:.1e}"
            + (f", {row['eager_places']} places EAGER" if row["eager_places"] else "")
            for name, row in result["rows"].items()
        ),
        f"peak MiB {peaks}, from float32 {result['from_float32']}",
        "eager's decode: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()),
        f"convolutions' ms by layout: {result['convolutions']}",
    ]
    return {
        "meaning": "speedup: the first_stage_model's own decode or encode by the GPU's clock, with "
        "all that runs around it per call; call_speedup: vae.decode / vae.encode by the wall "
        "clock; medians; profile: kernels of one decode by class",
        **result,
        "lines": lines,
    }
