"""The cases: each runs children and returns its result file, with a few `lines` for the table."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from .captured_cases import batches, exact, forms, run_costs, soak
from .cards_cases import SPLIT, multigpu_split
from .deepcache_cases import deepcache
from .lab import BUILD_WORKERS, DEFAULT, NATIVE, OFF, Lab
from .learned_cases import LEARNED, block_dispatch, learned, learned_soak
from .memory_cases import QUANTISED_CARDS, small_cards, vram_six
from .overflow_case import fp16_overflow, fp16_roundings
from .part_cases import BF16_VAE, FP32_VAE, controlnet, int8_rows, vae, vae_memory
from .pieces_case import PIECES, interrupt, pieces
from .prebuilt_case import prebuilt_without_card
from .product_case import int8_product
from .rival_cases import rival, rivals
from .stages import TEMPLATES
from .stages_case import stages
from .step_cache_cases import KINDS, step_cache
from .transformer_cases import (
    MORE,
    UNREPLAYED,
    easycache,
    more,
    small_transformers,
    transformer,
)
from .transformer_cases import SIZES as TRANSFORMER_SIZES
from .users_run_case import ROWS, users_run, users_run_rival
from .video_vae_case import video_vae

SOAK_PROMPTS = 100
BF16 = ("--bf16-unet",)
Result = dict[str, Any]


class Case(NamedTuple):
    """One case: how to run it, and about how long it takes on an H200 with its files made."""

    run: Callable[[Lab], Result]
    seconds: int


def cold_build(lab: Lab) -> Result:
    """First build of SDXL by 14 workers into an empty store, which later cases then use."""
    result = lab.run(
        "cold_build",
        limit_s=400,
        model=lab.model("sdxl"),
        kind=lab.kind("sdxl"),
        store=lab.store("sdxl", empty=True),
        size=lab.pixels(1024, 1024),
        workers=lab.workers(BUILD_WORKERS),
    )
    lines = [
        f"{result['build_seconds']} s, {result['graphs']} graphs, {result['disk_mb']} MB, "
        f"regions {result['report']['regions']}"
    ]
    return {**result, "lines": lines}


def bind(lab: Lab) -> Result:
    """Fresh processes on a full store, both modes; ours in the default one is a median of three."""
    lab.fill("sdxl", workers=BUILD_WORKERS)
    shared: Result = {
        "model": lab.model("sdxl"),
        "kind": lab.kind("sdxl"),
        "store": lab.store("sdxl"),
        "size": lab.pixels(1024, 1024),
    }
    plan = {
        "ours": {"ours": True, "warm": True},
        "ours_cold": {"ours": True, "warm": False},
        "eager": {"ours": False, "warm": True},
        "eager_cold": {"ours": False, "warm": False},
    }
    result: Result = {"meaning": "seconds; warm: one eager image was made before in that process"}
    for mode, flags in (("default", DEFAULT), ("off", OFF)):
        runs = {}
        for name, options in plan.items():
            headline = options["ours"] and mode == "default"
            runs[name] = [
                lab.run("bind", flags, limit_s=120, **shared, **options)
                for _ in range(3 if headline and not lab.smoke else 1)
            ]
        medians = {
            name: round(statistics.median(run["seconds"] for run in made), 3)
            for name, made in runs.items()
        }
        result[mode] = {**medians, "runs": runs}
    lines = [
        f"{mode}: " + ", ".join(f"{name} {result[mode][name]} s" for name in plan)
        for mode in ("default", "off")
    ]
    return {**result, "lines": lines}


def _speed(kind: str, flags: tuple[str, ...], *, dtype: str = "float16") -> Callable[[Lab], Result]:
    """A case that times eager against ours at 1024x1024 and 512x512."""

    def run(lab: Lab) -> Result:
        sizes = [lab.pixels(1024, 1024), lab.pixels(512, 512)]
        quick = {"rounds": 1, "steps": 4, "image_steps": 2} if lab.smoke else {}
        store = kind if dtype == "float16" else f"{kind}-{dtype}"
        result = lab.run(
            "speed",
            flags,
            limit_s=400,
            model=lab.model(kind, dtype=dtype),
            kind=lab.kind(kind),
            store=lab.store(store),
            sizes=sizes,
            workers=lab.workers(BUILD_WORKERS),
            **quick,
        )
        lines = [
            f"{size}: eager {row['eager']['unet_ms']['median']} ms, ours "
            f"{row['ours']['unet_ms']['median']} ms, x{row['speedup']}, "
            f"rel L2 {row['rel_l2']:.1e}, KSampler "
            f"{row['eager'].get('ksampler_seconds')} -> {row['ours'].get('ksampler_seconds')} s"
            + (f", {row['eager_calls']} region calls EAGER" if row["eager_calls"] else "")
            for size, row in result["rows"].items()
        ]
        return {**result, "lines": lines}

    return run


def _changes(flags: tuple[str, ...], mode: str) -> Callable[[Lab], Result]:
    """A case that makes every change after the first build, the last ones in a fresh process."""

    def run(lab: Lab) -> Result:
        shared: Result = {
            "model": lab.model("sdxl"),
            "second_model": lab.model("sdxl", seed=1),
            "loras": {form: lab.lora("sdxl", form) for form in ("linear", "conv")},
            "kind": lab.kind("sdxl"),
            "store": lab.store("sdxl"),
            "scale": 8 if lab.smoke else 1,
            "workers": lab.workers(BUILD_WORKERS),
        }
        first = lab.run("changes", flags, limit_s=400, part="first", **shared)
        again = lab.run("changes", flags, limit_s=200, hash_seed="4711", part="restart", **shared)
        rows = first["rows"] + again["rows"]
        after = first["builds"] + again["builds"] + again["first_builds"]
        worst = max(rows, key=lambda row: row["rel_l2"])
        eager = sum(row["eager_calls"] for row in rows)
        lines = [
            f"{len(rows)} changes, {after} builds after the first ({first['first_builds']} then), "
            f"{eager} eager region calls, rel L2 up to {worst['rel_l2']:.1e} ({worst['name']})"
        ]
        return {
            "mode": mode,
            "first_builds": first["first_builds"],
            "builds_after_first": after,
            "max_rel_l2": worst["rel_l2"],
            "eager_region_calls": eager,
            "parts": {"first": first, "restart": again},
            "lines": lines,
        }

    return run


def dispatch(lab: Lab) -> Result:
    """What our own code costs the processor at each place, without CUDA graphs."""
    result = lab.run_in_modes(
        "dispatch",
        limit_s=400,
        model=lab.model("sdxl"),
        kind=lab.kind("sdxl"),
        store=lab.store("sdxl"),
        size=lab.pixels(512, 512),
        workers=lab.workers(BUILD_WORKERS),
    )
    lines = [
        f"{name}: {row['places']} places, {row['median_us']} us each beyond their graphs, "
        f"worst {row['worst_us']} us, by form {row['forms']}"
        for name, row in result.items()
    ]
    return {**result, "lines": lines}


def _first_image(
    *, processes: int, warm: bool, kind: str = "sdxl", steps: int = 20
) -> Callable[[Lab], Result]:
    """The KSampler node in `background` on an empty store, and without us.

    Args:
        processes: how many of each, by turns.
        warm: after an eager image in the same process, the stricter case.
    """

    def run(lab: Lab) -> Result:
        shared: Result = {
            "model": lab.file(kind),
            "kind": lab.kind(kind),
            "size": lab.pixels(1024, 1024),
            "steps": 4 if lab.smoke else steps,
            "warm": warm,
        }
        runs: dict[str, list[Result]] = {"eager": [], "ours": []}
        for _ in range(1 if lab.smoke else processes):
            for name in runs:
                store = lab.store("first-image", empty=True)
                found = lab.run(
                    "first_image", limit_s=150, store=store, ours=name == "ours", **shared
                )
                runs[name].append(found)
        medians = {
            name: statistics.median(run["ksampler_seconds"] for run in made)
            for name, made in runs.items()
        }
        result: Result = {
            "meaning": "KSampler's wall time in a fresh process"
            + (", after one eager image in it" if warm else ""),
            "ksampler_seconds": medians,
            "first_image_ratio": round(medians["ours"] / medians["eager"], 3),
            "runs": runs,
        }
        return {**result, "lines": [f"{medians}, ratio {result['first_image_ratio']}"]}

    return run


_VAE_SIZES_FP32: list[list[Any]] = [["decode", 1024, 1024], ["encode", 1024, 1024]]
_VAE_SIZES = [*_VAE_SIZES_FP32, ["decode", 512, 512], ["decode", 2048, 2048]]
CASES: dict[str, Case] = {
    "cold_build": Case(cold_build, 80),
    "speed_default": Case(_speed("sdxl", DEFAULT), 60),
    "speed_off": Case(_speed("sdxl", OFF), 60),
    "bind": Case(bind, 170),
    "first_image": Case(_first_image(processes=7, warm=False), 290),
    "first_image_zimage": Case(_first_image(processes=3, warm=False, kind="zimage", steps=8), 150),
    "first_image_warm": Case(_first_image(processes=3, warm=True), 140),
    "changes_default": Case(_changes(DEFAULT, "default"), 90),
    "changes_off": Case(_changes(OFF, "dynamic VRAM off"), 120),
    "speed_native_allocator": Case(_speed("sdxl", NATIVE), 60),
    "speed_bf16_default": Case(_speed("sdxl", BF16, dtype="bfloat16"), 110),
    "speed_bf16_off": Case(_speed("sdxl", (*BF16, *OFF), dtype="bfloat16"), 60),
    "speed_sd15_default": Case(_speed("sd15", DEFAULT), 80),
    "speed_sd15_off": Case(_speed("sd15", OFF), 40),
    "vae_bf16": Case(vae(BF16_VAE, dtype="float16", sizes=_VAE_SIZES), 180),
    "vae_fp32": Case(vae(FP32_VAE, dtype="float32", sizes=_VAE_SIZES_FP32), 60),
    "vae_memory": Case(vae_memory, 50),
    "video_vae": Case(video_vae("wan21"), 80),
    "ltx_video_vae": Case(video_vae("ltx23"), 200),
    "h3_video_vae": Case(video_vae("h3"), 150),
    **{f"stages_{name}": Case(stages(name), 80) for name in TEMPLATES},
    "dispatch": Case(dispatch, 40),
    "int8_rows": Case(int8_rows, 20),
    "int8_product": Case(int8_product, 60),
    "fp16_overflow": Case(fp16_overflow, 150),
    "fp16_roundings": Case(fp16_roundings, 300),
    "prebuilt_without_card": Case(prebuilt_without_card, 240),
    "controlnet": Case(controlnet(captured=False), 60),
    "controlnet_captured": Case(controlnet(captured=True), 60),
    "users_run": Case(users_run, 150),
    "users_run_rival_a": Case(users_run_rival("users_run_rival_a", ROWS[:4], restart=True), 480),
    "users_run_rival_b": Case(users_run_rival("users_run_rival_b", ROWS[4:], restart=False), 430),
    "exact_default": Case(exact(DEFAULT), 60),
    "exact_off": Case(exact(OFF), 60),
    "exact_native": Case(exact(NATIVE), 60),
    "forms_default": Case(forms("sdxl", DEFAULT, image=True), 240),
    "forms_off": Case(forms("sdxl", OFF), 100),
    "forms_native": Case(forms("sdxl", NATIVE), 100),
    "forms_sd15_default": Case(forms("sd15", DEFAULT), 150),
    "batches": Case(batches, 90),
    "run_costs": Case(run_costs, 100),
    **{f"transformer_{name}": Case(transformer(name), 300) for name in TRANSFORMER_SIZES},
    **{f"transformer_{name}": Case(transformer(name), 200) for name in UNREPLAYED},
    **{f"transformer_{name}": Case(more(name), 90) for name in MORE},
    **{f"pieces_{name}": Case(pieces(name), 150) for name in PIECES},
    "interrupt": Case(interrupt, 120),
    **{f"multigpu_split_{kind}": Case(multigpu_split(kind), 150) for kind in SPLIT},
    **{f"learned_{name}": Case(learned(name), 90) for name in LEARNED},
    "learned_soak": Case(learned_soak, 200),
    "learned_dispatch": Case(block_dispatch, 90),
    "forms_bf16_default": Case(forms("sdxl", (*BF16, *DEFAULT), dtype="bfloat16"), 200),
    **{f"soak_{seed}": Case(soak(seed, SOAK_PROMPTS), 500) for seed in range(5)},
    "rival_static": Case(rival(dynamic=False), 260),
    "rival_dynamic": Case(rival(dynamic=True), 275),
    "rivals": Case(rivals, 480),
    "vram_six": Case(vram_six("sdxl"), 60),
    **{
        f"vram_six_{kind}": Case(vram_six(kind), 150)
        for kind in ("zimage", "flux1", "zimage_int8", "flux1_fp8")
    },
    "easycache": Case(easycache, 90),
    **{f"step_cache_{kind}": Case(step_cache(kind), 100) for kind in KINDS},
    "small_transformers": Case(small_transformers, 120),
    "small_cards": Case(small_cards("sdxl"), 150),
    **{f"small_cards_{name}": Case(small_cards(name), 200) for name in QUANTISED_CARDS},
    "deepcache_sdxl_default": Case(deepcache("sdxl", DEFAULT), 60),
    "deepcache_sdxl_off": Case(deepcache("sdxl", OFF), 60),
    "deepcache_sd15_default": Case(deepcache("sd15", DEFAULT), 80),
    "deepcache_sd15_off": Case(deepcache("sd15", OFF), 60),
}
