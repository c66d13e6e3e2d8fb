"""The cases of parts: VAE and ControlNet, which stand beside a UNet, and a kernel of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .lab import BUILD_WORKERS, DEFAULT, Lab

BF16_VAE = ("--bf16-vae",)
FP32_VAE = ("--fp32-vae",)
# (width, height, batch), in the order in which a user might come by them.
TEN_SIZES = (
    (512, 512, 1),
    (640, 640, 1),
    (768, 512, 1),
    (512, 768, 1),
    (720, 960, 1),
    (1024, 1024, 1),
    (1152, 896, 1),
    (832, 1216, 1),
    (1024, 1024, 2),
    (1536, 1024, 1),
)
#: Rows, width, activation, rotated: Z-Image, Flux' last product and Wan 14B's, H3's feed-forward.
INT8_ROWS: tuple[tuple[int, int, str, bool], ...] = (
    *((4352, 3840, "", rotated) for rotated in (True, False)),
    *((4608, 15360, "", rotated) for rotated in (True, False)),
    *((14040, width, "", True) for width in (5120, 13824)),
    *((14040, 13824, "gelu_tanh", rotated) for rotated in (True, False)),
    *((8192, 14336, "swiglu", rotated) for rotated in (True, False)),
    (4096, 28672, "", True),
)
Result = dict[str, Any]


def int8_rows(lab: Lab) -> Result:
    """What int8 weights multiply, made int8 by the library's kernels and by ours."""
    result = lab.run("int8_rows", limit_s=120, cases=[list(case) for case in INT8_ROWS])
    lines = [
        f"{name}: library {row.get('library_ms')} ms ({row.get('library_gb_s')} GB/s), ours "
        f"{row.get('ours_ms')} ms ({row.get('ours_gb_s')} GB/s)"
        for name, row in result["rows"].items()
    ]
    return {"meaning": "bytes of a row's read and of its int8's write", **result, "lines": lines}


def vae(flags: tuple[str, ...], *, dtype: str, sizes: list[list[Any]]) -> Callable[[Lab], Result]:
    """A case that builds a VAE's graphs into an empty store, times both and compares pixels.

    Args:
        dtype: of the file; what the VAE computes in is for the flags to say.
        sizes: ["decode" or "encode", width, height].
    """

    def run(lab: Lab) -> Result:
        quick = {"rounds": 2, "warm": 1} if lab.smoke else {}
        result = lab.run(
            "vae_speed",
            flags,
            limit_s=3000 if lab.smoke else 560,
            model=lab.model("vae", dtype=dtype),
            kind=lab.kind("vae"),
            # A smoke run builds for minutes: its second run, and `vae_memory`, take what is there.
            store=lab.store(_store(flags), empty=not lab.smoke),
            sizes=[[work, *lab.pixels(width, height)] for work, width, height in sizes],
            compare=lab.pixels(1024, 1024),
            workers=lab.workers(BUILD_WORKERS),
            **quick,
        )
        errors = result["errors"]
        lines = [
            f"{result['build_seconds']} s, {result['builds']} builds, {result['graphs']} graphs, "
            f"{result['disk_mb']} MB, regions {result['report']['regions']}",
            *(
                f"{name}: eager {row['eager']['model_ms']['median']} ms, ours "
                f"{row['ours']['model_ms']['median']} ms, x{row['speedup']}, whole call "
                f"x{row['call_speedup']}"
                + (f", {row['eager_calls']} region calls EAGER" if row["eager_calls"] else "")
                for name, row in result["rows"].items()
            ),
            f"pixels: up to {errors['max_difference'] * 255:.3f}/255 from eager; from float32, "
            f"ours / eager: largest {errors['largest_ratio']}, mean {errors['mean_ratio']}",
        ]
        return {
            "meaning": "speedup: the first_stage_model's own decode or encode by the GPU's clock, "
            "with all that runs around it per call; call_speedup: vae.decode / vae.encode by the "
            "wall clock, copies to and from the CPU included; medians",
            **result,
            "lines": lines,
        }

    return run


def vae_memory(lab: Lab) -> Result:
    """Ten sizes, then the peak of a decode, eager and ours each in a process of its own."""
    shared: Result = {
        "model": lab.model("vae"),
        "kind": lab.kind("vae"),
        "store": lab.store(_store(BF16_VAE)),
    }
    # Files may be there and still not be those of this code: this loads them, or builds.
    lab.run(
        "vae_fill",
        BF16_VAE,
        limit_s=1500 if lab.smoke else 400,
        workers=lab.workers(BUILD_WORKERS),
        **shared,
    )
    runs = {
        name: lab.run(
            "vae_memory",
            BF16_VAE,
            limit_s=200,
            sizes=[[*lab.pixels(width, height), batch] for width, height, batch in TEN_SIZES],
            peaks=[lab.pixels(side, side) for side in (1024, 2048)],
            ours=name == "ours",
            **shared,
        )
        for name in ("eager", "ours")
    }
    sizes = {name: run["sizes"] for name, run in runs.items()}
    result: Result = {
        "meaning": "peak: PyTorch's peak of allocated bytes over one decode after ten sizes; "
        "extra: seconds that a size's first decode takes more than its second, of the worst size, "
        "ours less eager's own at that size, no less than zero",
        "peak_ratio": {
            size: _ratio(peak["allocated_mib"], runs["eager"]["peaks"][size]["allocated_mib"])
            for size, peak in runs["ours"]["peaks"].items()
        },
        "new_size_extra_seconds": new_size_extra(sizes),
        "max_extra_seconds": {
            name: max(row["extra"] for row in rows.values()) for name, rows in sizes.items()
        },
        "builds": runs["ours"]["builds"],
        "eager_calls": runs["ours"]["eager_calls"],
        "runs": runs,
    }
    lines = [
        *(
            f"{size}: peak eager {runs['eager']['peaks'][size]['allocated_mib']} MiB, ours "
            f"{runs['ours']['peaks'][size]['allocated_mib']} MiB, ratio {ratio}"
            for size, ratio in result["peak_ratio"].items()
        ),
        f"new size: {result['new_size_extra_seconds']} s more than eager, at most "
        f"{result['max_extra_seconds']}, {result['builds']} builds, "
        f"{result['eager_calls']} region calls eager, regions {runs['ours']['report']['regions']}",
    ]
    return {**result, "lines": lines}


def new_size_extra(sizes: dict[str, dict[str, dict[str, float]]]) -> float:
    """The most that ours pays for a size's first decode beyond what eager pays for it.

    That an eager first decode was quicker than the second is noise, and no debt of ours.
    """
    eager, ours = sizes["eager"], sizes["ours"]
    beyond = [row["extra"] - max(0.0, eager[name]["extra"]) for name, row in ours.items()]
    return round(max(0.0, *beyond), 4)


def controlnet(*, captured: bool) -> Callable[[Lab], Result]:
    """A case of SDXL under its ControlNet, both compiled against both eager.

    Args:
        captured: replay the calls of both from CUDA graphs, as the pack does by itself.
    """

    def run(lab: Lab) -> Result:
        quick = {"rounds": 1, "steps": 4} if lab.smoke else {}
        result = lab.run(
            "controlnet",
            DEFAULT,
            limit_s=1500 if lab.smoke else 400,
            model=lab.model("sdxl"),
            control=lab.controlnet("sdxl"),
            kind=lab.kind("sdxl"),
            store=lab.store("sdxl"),
            size=lab.pixels(1024, 1024),
            captured=captured,
            workers=lab.workers(BUILD_WORKERS),
            **quick,
        )
        lines = [
            *(
                f"{part}: eager {result['eager'][f'{part}_ms'].get('median')} ms, ours "
                f"{result['ours'][f'{part}_ms'].get('median')} ms, x{result[f'{part}_speedup']}"
                for part in ("control", "unet", "step")
            ),
            f"control rel L2 up to {result['control_rel_l2']['max']:.1e}, "
            f"{result['control_builds']} builds in {result['control_build_seconds']} s; region "
            f"calls eager: control {result['control_eager_calls']}, unet "
            f"{result['unet_eager_calls']}; captured {result['captured']}",
        ]
        return {**result, "lines": lines}

    return run


def _store(flags: tuple[str, ...]) -> str:
    return "vae" + "".join(flag.removesuffix("-vae").replace("--", "-") for flag in flags)


def _ratio(ours: float | None, eager: float | None) -> float | None:
    """None where nothing was measured (no GPU)."""
    return round(ours / eager, 3) if ours is not None and eager else None
