"""The cases of video VAEs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from .lab import BUILD_WORKERS, DEFAULT, Lab
from .part_cases import BF16_VAE


class Sizes(NamedTuple):
    """What of a video VAE is measured: ["decode" or "encode", width, height, frames], the longest
    for a smoke run, and the decodes whose peak is taken and that is compared with float32.
    """

    dim: int
    narrow_dim: int
    flags: tuple[str, ...]
    rows: list[list[Any]]
    smoke_frames: int
    peak: list[int]
    exact: list[int]


SIZES = {
    "wan21": Sizes(
        96,
        8,
        BF16_VAE,
        [[work, 832, 480, n] for work in ("decode", "encode") for n in (17, 33)],
        9,
        [832, 480, 17],
        [832, 480, 5],
    ),
    # As the templates have it: image to video encodes one frame.
    "ltx23": Sizes(
        128,
        8,
        BF16_VAE,
        [["decode", 1280, 704, 121], ["decode", 768, 512, 121]],
        17,
        [1280, 704, 121],
        [768, 512, 25],
    ),
    # In float16, as the host has it; image to video encodes one frame.
    "h3": Sizes(
        128,
        32,
        DEFAULT,
        [["decode", 896, 512, 56], ["decode", 864, 480, 124]],
        22,
        [896, 512, 56],
        [448, 256, 22],
    ),
}


def video_vae(kind: str) -> Callable[[Lab], dict[str, Any]]:
    """A case that decodes and encodes short videos by a VAE, eager and ours in one process.

    Args:
        kind: one of `SIZES`: Wan 2.1's, LTX-2.3's, MiniMax H3's.
    """
    return partial(_video_vae, kind)


def _video_vae(kind: str, lab: Lab) -> dict[str, Any]:
    known = SIZES[kind]

    def size(width: int, height: int, frames: int) -> list[int]:
        return [
            *lab.pixels(width, height),
            min(frames, known.smoke_frames if lab.smoke else frames),
        ]

    quick = {"rounds": 1} if lab.smoke else {}
    result = lab.run(
        "video_vae",
        known.flags,
        limit_s=1500 if lab.smoke else 500,
        kind=kind,
        dim=known.narrow_dim if lab.smoke else known.dim,
        # A smoke run builds for minutes: its second run takes what is there.
        store=lab.store(f"video-vae-{kind}", empty=not lab.smoke),
        sizes=[[work, *size(*sides)] for work, *sides in known.rows],
        peak=size(*known.peak),
        exact=size(*known.exact),
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
        "kernels of a decode, ms: "
        + ", ".join(f"{name} {each['kernel_ms']}" for name, each in result["profile"].items()),
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
