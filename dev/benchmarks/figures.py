"""Every headline figure: where it stands in the case files, its unit and its bar."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from .cards_cases import CARDS_FIGURES
from .figure import Figure, largest, speedup
from .learned_cases import LEARNED_FIGURES
from .overflow_case import OVERFLOW_FIGURES
from .step_cache_cases import STEP_CACHE_FIGURES
from .transformer_figures import TRANSFORMER_FIGURES
from .users_run_case import total


def _largest_of_some(*path: str) -> Callable[..., Any]:
    def read(*cases: Any) -> Any:
        return max(_dig(case, path) for case in cases if path[0] in case)

    return read


def _dig(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _form(size: str, name: str) -> Callable[..., Any]:
    return lambda case: case["rows"][size][name]


def _quotient(row: dict[str, Any], slow: str, fast: str) -> float:
    slower, faster = (float(row[name]["unet_ms"]["median"]) for name in (slow, fast))
    return round(slower / faster, 3)


def _gpu_bound(case: dict[str, Any]) -> float:
    """Of the medians: `gpu_bound_speedup` of older results is of another form."""
    return _quotient(case["rows"]["1024x1024"], "exact", "any_shape")


def _images(case: dict[str, Any]) -> float:
    row = case["rows"]["1024x1024"]
    eager, ours = (float(row[name]["ksampler_seconds"]) for name in ("eager", "any_shape"))
    return round(eager / ours, 3)


def _overhead(rows: dict[str, Any]) -> float:
    ours, eager = (float(rows[name]["overhead_seconds"]) for name in ("any_shape", "eager"))
    return round(ours - eager, 3)


def _psnr(case: dict[str, Any], way: str) -> float:
    rows = [row for row in case["rows"] if (row["way"], row["interval"]) == (way, 3)]
    return round(statistics.mean(row["psnr"] for row in rows), 2)


def _rival(case: dict[str, Any]) -> Any:
    row = case.get("rows", {}).get("1024x1024")
    return row["speedup"] if row else f"> {case['limit_s']:.0f} s"


def _rival_seconds(case: dict[str, Any]) -> Any:
    row = case.get("rows", {}).get("1024x1024")
    return row["compile_seconds"] if row else f"> {case['limit_s']:.0f}"


def _users_run(key: str, contender: str) -> Callable[..., Any]:
    return lambda case: case[key][contender]


def _users_run_rival(*cases: dict[str, Any]) -> Any:
    return total(row for case in cases for row in case["rows"].values())


_USERS_RIVALS = ("users_run_rival_a", "users_run_rival_b")
_CHANGES = ("changes_default", "changes_off")
_FP16_FORMS = ("forms_default", "forms_off", "forms_sd15_default")
FIGURES: dict[str, Figure] = {
    **TRANSFORMER_FIGURES,
    **LEARNED_FIGURES,
    **OVERFLOW_FIGURES,
    **STEP_CACHE_FIGURES,
    **CARDS_FIGURES,
    "sdxl_1024_default_host_regions_speedup": Figure(
        "eager / ours", ("speed_default",), speedup("1024x1024"), ">= 1.5"
    ),
    "sdxl_1024_regions_speedup": Figure(
        "eager / ours", ("speed_off",), speedup("1024x1024"), ">= 1.12"
    ),
    "builds_after_first": Figure(
        "builds", _CHANGES, lambda *cases: sum(case["builds_after_first"] for case in cases), "== 0"
    ),
    "max_rel_l2_fp16": Figure(
        "relative L2",
        (*_CHANGES, *_FP16_FORMS),
        _largest_of_some("max_rel_l2"),
        "<= 5e-3",
        any_of=True,
    ),
    "sdxl_disk_mb": Figure("MB", ("cold_build",), lambda case: case["disk_mb"], "<= 15"),
    "sdxl_bind_seconds": Figure("s", ("bind",), lambda case: case["default"]["ours"], "<= 0.7"),
    "sdxl_cold_build_seconds": Figure(
        "s", ("cold_build",), lambda case: case["build_seconds"], "<= 25"
    ),
    "first_image_ratio": Figure(
        "ours / eager", ("first_image",), lambda case: case["first_image_ratio"], "<= 1.15"
    ),
    "vae_decode_1024_speedup": Figure(
        "eager / ours", ("vae_bf16",), speedup("decode 1024x1024"), ">= 1.9"
    ),
    "vae_decode_2048_speedup": Figure(
        "eager / ours", ("vae_bf16",), speedup("decode 2048x2048"), ">= 1.7"
    ),
    "vae_decode_1024_fp32_speedup": Figure(
        "eager / ours", ("vae_fp32",), speedup("decode 1024x1024"), ">= 1.6"
    ),
    "vae_encode_1024_speedup": Figure(
        "eager / ours", ("vae_bf16",), speedup("encode 1024x1024"), ">= 1.6"
    ),
    "vae_peak_ratio_1024": Figure(
        "ours / eager", ("vae_memory",), lambda case: case["peak_ratio"]["1024x1024"], "<= 0.8"
    ),
    "vae_peak_ratio_2048": Figure(
        "ours / eager", ("vae_memory",), lambda case: case["peak_ratio"]["2048x2048"], "<= 0.8"
    ),
    "video_vae_decode_speedup": Figure(
        "eager / ours", ("video_vae",), speedup("decode 832x480, 17 frames"), ">= 1.1"
    ),
    "video_vae_encode_speedup": Figure(
        "eager / ours", ("video_vae",), speedup("encode 832x480, 17 frames")
    ),
    "ltx_video_vae_decode_speedup": Figure(
        "eager / ours",
        ("ltx_video_vae",),
        speedup("decode 1280x704, 121 frames"),
        ">= 1.4",
    ),
    "ltx_video_vae_peak_ratio": Figure(
        "ours / eager",
        ("ltx_video_vae",),
        lambda case: round(case["peak_mib"]["ours"] / case["peak_mib"]["eager"], 3),
        "<= 1.0",
    ),
    "h3_video_vae_decode_speedup": Figure(
        "eager / ours",
        ("h3_video_vae",),
        speedup("decode 864x480, 124 frames"),
        ">= 1.25",
    ),
    "h3_video_vae_peak_ratio": Figure(
        "ours / eager",
        ("h3_video_vae",),
        lambda case: round(case["peak_mib"]["ours"] / case["peak_mib"]["eager"], 3),
        "<= 1.05",
    ),
    "vae_new_size_extra_seconds": Figure(
        "s", ("vae_memory",), lambda case: case["new_size_extra_seconds"], "<= 0.3"
    ),
    "controlnet_step_speedup": Figure(
        "eager / ours", ("controlnet",), lambda case: case["control_speedup"], ">= 1.4"
    ),
    "controlnet_unet_step_speedup": Figure(
        "eager / ours", ("controlnet",), lambda case: case["step_speedup"], ">= 1.45"
    ),
    "vae_fp32_max_pixel_difference": Figure(
        "of 255",
        ("vae_fp32",),
        lambda case: round(case["errors"]["max_difference"] * 255, 3),
        "<= 1",
    ),
    "vae_bf16_error_ratio": Figure(
        "ours / eager",
        ("vae_bf16",),
        lambda case: max(case["errors"]["largest_ratio"], case["errors"]["mean_ratio"]),
        "<= 1.1",
    ),
    # Whole calls replayed from CUDA graphs.
    "exact_max_abs_diff": Figure(
        "difference", ("exact_default",), lambda case: case["max_abs_diff"], "== 0"
    ),
    "sdxl_512_exact_default_host_speedup": Figure(
        "eager / exact", ("forms_default",), _form("512x512", "exact_speedup"), ">= 3.4"
    ),
    "sdxl_1024_exact_default_host_speedup": Figure(
        "eager / exact", ("forms_default",), _form("1024x1024", "exact_speedup")
    ),
    "sdxl_1024_default_host_speedup": Figure(
        "eager / ours", ("forms_default",), _form("1024x1024", "any_shape_speedup"), ">= 1.8"
    ),
    "sdxl_512_default_host_speedup": Figure(
        "eager / ours", ("forms_default",), _form("512x512", "any_shape_speedup"), ">= 4.2"
    ),
    "sdxl_1024_speedup": Figure(
        "eager / ours", ("forms_off",), _form("1024x1024", "any_shape_speedup")
    ),
    "sdxl_512_speedup": Figure(
        "eager / ours", ("forms_off",), _form("512x512", "any_shape_speedup")
    ),
    "sdxl_1024_gpu_bound_any_shape_speedup": Figure(
        "exact / ours", ("forms_default",), _gpu_bound, ">= 1.4"
    ),
    "sdxl_1024_ksampler_default_host_speedup": Figure(
        "eager / ours", ("forms_default",), _images, ">= 1.8"
    ),
    "image_end_to_end_default_host_speedup": Figure(
        "eager / ours",
        ("forms_default",),
        lambda case: case["image_end_to_end"]["speedup"],
        ">= 1.8",
    ),
    "controlnet_unet_1024_default_host_speedup": Figure(
        "eager / ours", ("controlnet_captured",), lambda case: case["step_speedup"], ">= 1.8"
    ),
    **{
        f"sdxl_1024_vs_{rival}": Figure(
            f"{rival} / ours",
            ("rivals",),
            lambda case, rival=rival: _quotient(case["row"], rival, "any_shape"),
            bar,
        )
        for rival, bar in (
            ("torch_compile", ">= 1.2"),
            ("reduce_overhead", ">= 1.1"),
            ("per_block", ""),
        )
    },
    "sdxl_1024_kernels_vs_torch_compile": Figure(
        "torch_compile / ours, kernels alone",
        ("rivals",),
        lambda case: round(case["kernel_ms"]["torch_compile"] / case["kernel_ms"]["any_shape"], 3),
    ),
    "vram_peak_ratio_six_signatures": Figure(
        "ours / eager", ("vram_six",), lambda case: case["peak_ratio"], "<= 1.15"
    ),
    "sdxl_bf16_1024_default_host_speedup": Figure(
        "eager / ours", ("forms_bf16_default",), _form("1024x1024", "any_shape_speedup")
    ),
    "sdxl_bf16_1024_gpu_bound_any_shape_speedup": Figure(
        "exact / ours", ("forms_bf16_default",), _gpu_bound
    ),
    "sd15_512_default_host_speedup": Figure(
        "eager / ours", ("forms_sd15_default",), _form("512x512", "any_shape_speedup"), ">= 4.0"
    ),
    "sd15_1024_gpu_bound_any_shape_speedup": Figure(
        "exact / ours", ("forms_sd15_default",), _gpu_bound, ">= 1.65"
    ),
    "cold_first_image_default_host_ratio": Figure(
        "ours / eager", ("first_image",), lambda case: case["first_image_ratio"], "<= 0.85"
    ),
    "dispatch_us_per_place": Figure(
        "us", ("dispatch",), lambda case: case["off"]["median_us"], "<= 15"
    ),
    "dispatch_us_per_place_default_host": Figure(
        "us", ("dispatch",), lambda case: case["default"]["median_us"], "<= 15"
    ),
    "int8_product_ratio": Figure(
        "library / ours",
        ("int8_product",),
        lambda case: case["int8_product_ratio"],
        ">= 1.35",
    ),
    "prebuilt_without_card_ratio": Figure(
        "built without the card / on it",
        ("prebuilt_without_card",),
        lambda case: case["crossbuilt_ratio"],
        "<= 1.1",
    ),
    "new_size_capture_seconds": Figure(
        "s", ("run_costs",), lambda case: case["capture_seconds"], "<= 0.3"
    ),
    "ksampler_overhead_seconds": Figure(
        "s, ours - eager's", ("run_costs",), lambda case: _overhead(case["overhead"]), "<= 0.05"
    ),
    # Whole images of 20 steps, one full step in three.
    **{
        f"{name}_{size}_speedup": Figure(
            "eager / ours", (case,), lambda case, made=made: case["speedups"][made], bar
        )
        for case, size, name, made, bar in (
            ("deepcache_sdxl_default", "sdxl_1024", "deepcache", "deepcache", ">= 2.0"),
            ("deepcache_sdxl_default", "sdxl_1024", "deepcache_compiled", "both", ">= 3.6"),
            ("deepcache_sd15_default", "sd15_512", "deepcache", "deepcache", ">= 2.0"),
            ("deepcache_sd15_default", "sd15_512", "deepcache_compiled", "both", ">= 6.0"),
        )
    },
    "deepcache_max_abs_diff_interval1": Figure(
        "difference",
        ("deepcache_sdxl_default", "deepcache_sd15_default"),
        largest("max_abs_diff_interval1"),
        "== 0",
    ),
    # The small trained model, the node's schedule, mean over the samplers; the host's own at the
    # same share of work.
    **{
        f"deepcache_{name}interval3_psnr_db": Figure(
            "dB", ("deepcache_quality",), lambda case, way=way: _psnr(case, way)
        )
        for name, way in (
            ("", "quadratic early"),
            ("easycache_at_", "EasyCache"),
            ("lazycache_at_", "LazyCache"),
        )
    },
    # Beyond the bars: the same under other conditions, for honest reading of those above.
    "first_image_warm_ratio": Figure(
        "ours / eager", ("first_image_warm",), lambda case: case["first_image_ratio"], "<= 1.05"
    ),
    "sdxl_bind_cold_seconds": Figure("s", ("bind",), lambda case: case["default"]["ours_cold"]),
    "sdxl_eager_first_step_cold_seconds": Figure(
        "s", ("bind",), lambda case: case["default"]["eager_cold"]
    ),
    "sdxl_512_default_host_regions_speedup": Figure(
        "eager / ours", ("speed_default",), speedup("512x512")
    ),
    "sdxl_512_regions_speedup": Figure("eager / ours", ("speed_off",), speedup("512x512")),
    "sdxl_bf16_1024_default_host_regions_speedup": Figure(
        "eager / ours", ("speed_bf16_default",), speedup("1024x1024")
    ),
    "sdxl_bf16_1024_regions_speedup": Figure(
        "eager / ours", ("speed_bf16_off",), speedup("1024x1024")
    ),
    "sd15_512_default_host_regions_speedup": Figure(
        "eager / ours", ("speed_sd15_default",), speedup("512x512")
    ),
    "sd15_512_regions_speedup": Figure("eager / ours", ("speed_sd15_off",), speedup("512x512")),
    # The run of OneDiff's users: eight images and the first one after a restart.
    "users_run_builds_after_first_row": Figure(
        "builds", ("users_run",), lambda case: case["builds_after_first_row"]
    ),
    "users_run_total_seconds_eager": Figure(
        "s", ("users_run",), _users_run("total_seconds", "eager")
    ),
    "users_run_total_seconds_ours": Figure(
        "s", ("users_run",), _users_run("total_seconds", "ours")
    ),
    "users_run_total_seconds_torch_compile": Figure("s", _USERS_RIVALS, _users_run_rival),
    "users_run_again_seconds_eager": Figure(
        "s", ("users_run",), _users_run("again_seconds", "eager")
    ),
    "users_run_again_seconds_ours": Figure(
        "s", ("users_run",), _users_run("again_seconds", "ours")
    ),
    "sdxl_1024_torch_compile_static_speedup": Figure("eager / compiled", ("rival_static",), _rival),
    "sdxl_1024_torch_compile_static_seconds": Figure("s", ("rival_static",), _rival_seconds),
    "sdxl_1024_torch_compile_dynamic_speedup": Figure(
        "eager / compiled", ("rival_dynamic",), _rival
    ),
    "sdxl_1024_torch_compile_dynamic_seconds": Figure("s", ("rival_dynamic",), _rival_seconds),
}
