"""The cases of CUDA graphs: exactness, and the speed of each form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .lab import BUILD_WORKERS, DEFAULT, ChildError, Lab

Result = dict[str, Any]
FORMS = ("eager", "exact", "any_shape")
# (width, height, batch); the last three are those that broke others.
TEN_SIZES = (
    (1024, 1024, 1),
    (512, 512, 1),
    (768, 768, 1),
    (1152, 896, 1),
    (832, 1216, 1),
    (512, 512, 4),
    (1024, 1024, 2),
    (720, 960, 1),
    (1536, 640, 1),
    (584, 328, 3),
)
# One that was seen before, and six new ones.
RUN_SIZES = (
    (1024, 1024),
    (896, 1024),
    (1152, 896),
    (768, 1344),
    (640, 1536),
    (832, 1216),
    (1024, 768),
)


def exact(flags: tuple[str, ...]) -> Callable[[Lab], Result]:
    """A case that asks for the same bits as eager, under certain flags of the host."""

    def run(lab: Lab) -> Result:
        result = lab.run(
            "captured_exact",
            flags,
            limit_s=240,
            model=lab.model("sdxl"),
            kind=lab.kind("sdxl"),
            store=lab.store("exact"),
            sizes=[[*lab.pixels(width, height), batch] for width, height, batch in TEN_SIZES],
            loras={form: lab.lora("sdxl", form) for form in ("linear", "conv")},
        )
        captured = result["captured"]
        lines = [
            f"{len(result['rows'])} runs, largest difference {result['max_abs_diff']}, "
            f"{captured['captures']} captures, {captured['replayed']} replays, "
            f"{captured['vram_bytes'] >> 20} MiB, not replayed {captured['not_replayed']}, "
            f"{max(row['pinned_pages'] for row in result['rows'])} pages kept from the host"
        ]
        return {**result, "lines": lines}

    return run


def forms(
    kind: str, flags: tuple[str, ...], *, dtype: str = "float16", image: bool = False
) -> Callable[[Lab], Result]:
    """A case that times eager, exact and any-shape in turns.

    Args:
        image: time whole images, too, VAE Decode with them.
    """

    def run(lab: Lab) -> Result:
        quick = {"rounds": 1, "steps": 4, "image_steps": 2} if lab.smoke else {}
        store = kind if dtype == "float16" else f"{kind}-{dtype}"
        result = lab.run(
            "captured_forms",
            flags,
            limit_s=3000 if lab.smoke else 560,
            model=lab.model(kind, dtype=dtype),
            kind=lab.kind(kind),
            store=lab.store(store),
            sizes=[lab.pixels(1024, 1024), lab.pixels(512, 512)],
            workers=lab.workers(BUILD_WORKERS),
            **({"vae": lab.model("vae"), "vae_kind": lab.kind("vae")} if image else {}),
            **quick,
        )
        lines = []
        for size, row in result["rows"].items():
            times = {name: row[name]["unet_ms"].get("median") for name in FORMS}
            images = {name: row[name].get("ksampler_seconds") for name in FORMS}
            speedups = ", ".join(f"{name} x{row[f'{name}_speedup']}" for name in FORMS[1:])
            worst = {name: f"{max(found):.1e}" for name, found in row["rel_l2"].items()}
            lines.append(
                f"{size}: {times} ms, {speedups}, exact / any_shape x{row['gpu_bound_speedup']}, "
                f"KSampler {images} s, captured {_captured_mib(row)} MiB, rel L2 {worst}"
            )
        if image:
            whole = result["image_end_to_end"]
            lines.append(f"image: {whole['seconds']} s, x{whole['speedup']}")
        lines.append(f"given back {result['given_back_mib']} MiB")
        return {**result, "lines": lines}

    return run


def batches(lab: Lab) -> Result:
    """Eager, exact and any-shape in turns with 1 to 8 images at once."""
    quick = {"rounds": 1, "steps": 4} if lab.smoke else {}
    width, height = lab.pixels(1024, 1024)
    result = lab.run(
        "forms_batches",
        DEFAULT,
        limit_s=1500 if lab.smoke else 300,
        model=lab.model("sdxl"),
        kind=lab.kind("sdxl"),
        store=lab.store("sdxl"),
        sizes=[[width, height, batch] for batch in (1, 2, 4, 8)],
        workers=lab.workers(BUILD_WORKERS),
        **quick,
    )
    lines = [
        f"batch {batch}: "
        + ", ".join(f"{name} {row[name]['unet_ms'].get('median')} ms" for name in FORMS)
        + f", exact x{row['exact_speedup']}, any shape x{row['any_shape_speedup']}"
        for batch, row in result["rows"].items()
    ]
    return {**result, "lines": lines}


def run_costs(lab: Lab) -> Result:
    """What a KSampler costs besides its steps, and the first run of a size, in the default mode."""
    result = lab.run(
        "run_costs",
        DEFAULT,
        limit_s=1500 if lab.smoke else 300,
        model=lab.model("sdxl"),
        kind=lab.kind("sdxl"),
        store=lab.store("sdxl"),
        sizes=[lab.pixels(*size) for size in RUN_SIZES],
        workers=lab.workers(BUILD_WORKERS),
        **({"steps": 5} if lab.smoke else {}),
    )
    overhead = {name: row["overhead_seconds"] for name, row in result["overhead"].items()}
    first = {size: row["any_shape"]["more_seconds"] for size, row in result["new_sizes"].items()}
    lines = [
        f"besides its steps {overhead} s; a first run of a size takes {first} s more, "
        f"{result['capture_seconds']} s by the median"
    ]
    return {**result, "lines": lines}


def soak(seed: int, prompts: int) -> Callable[[Lab], Result]:
    """A case that changes everything at random; every slice has a seed of its own.

    The prompts that were made by the time a slice was stopped are a result.
    """

    def run(lab: Lab) -> Result:
        stopped = ""
        try:
            result = lab.run(
                "soak",
                limit_s=3600 if lab.smoke else 560,
                model=lab.model("sdxl"),
                second_model=lab.model("sdxl", seed=1),
                loras={form: lab.lora("sdxl", form) for form in ("linear", "conv")},
                control=lab.controlnet("sdxl"),
                kind=lab.kind("sdxl"),
                store=lab.store("sdxl"),
                seed=seed,
                prompts=3 if lab.smoke else prompts,
                scale=8 if lab.smoke else 1,
                workers=lab.workers(BUILD_WORKERS),
            )
        except ChildError as failure:
            if not failure.stopped or "prompts" not in failure.partial:
                raise
            result, stopped = failure.partial, str(failure)
        lines = [
            f"{result['prompts']} prompts of seed {seed}: rel L2 up to {result['max_rel_l2']:.1e}, "
            f"{result['builds']} builds, {result['vram_mib_per_100_prompts']} MiB of the card's, "
            f"{result['torch_mib_per_100_prompts']} MiB of PyTorch's more per 100 prompts, "
            f"{result['captures']} captures, {result['replayed']} steps replayed",
            *(f"WRONG: {row}" for row in result["failing"]),
        ]
        return {**result, "partial": stopped or None, "lines": lines}

    return run


def _captured_mib(row: Result) -> int:
    """VRAM that all captured calls hold: each form's report has the count of the process."""
    return max(found["vram_bytes"] for found in row["captured"].values()) >> 20
