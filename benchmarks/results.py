"""Result files: one per case, and the flat headline made from them."""

from __future__ import annotations

import datetime
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .users_run_case import total

HEADLINE = "headline.json"


class Figure(NamedTuple):
    """One headline figure: where it stands in the case files, its unit and its bar.

    Attributes:
        any_of: made from those of the cases that are there, not only from all of them.
    """

    unit: str
    cases: tuple[str, ...]
    read: Callable[..., Any]
    bar: str = ""
    any_of: bool = False


def _speedup(size: str) -> Callable[..., Any]:
    return lambda case: case["rows"][size]["speedup"]


def _largest(*path: str) -> Callable[..., Any]:
    def read(*cases: Any) -> Any:
        return max(_dig(case, path) for case in cases if path[0] in case)

    return read


def _dig(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _form(size: str, name: str) -> Callable[..., Any]:
    return lambda case: case["rows"][size][name]


def _gpu_bound(row: dict[str, Any]) -> float:
    exact, ours = (float(row[name]["unet_ms"]["median"]) for name in ("exact", "any_shape"))
    return round(exact / ours, 3)


def _specialised(row: dict[str, Any]) -> Any:
    """None where no graph of that size came, and the others were timed once more."""
    return row["specialised_speedup"] if row["specialised_builds"]["graphs"] else None


def _images(form: str) -> Callable[..., Any]:
    def read(case: dict[str, Any]) -> float:
        row = case["rows"]["1024x1024"]
        eager, ours = (float(row[name]["ksampler_seconds"]) for name in ("eager", form))
        return round(eager / ours, 3)

    return read


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


def _smallest_against_blocks(*cases: dict[str, Any]) -> float:
    """Over the first sizes of all that were measured."""
    rows = [next(iter(case["rows"].values())) for case in cases]
    return min(float(row["vs_per_block_torch_compile"]) for row in rows)


def _median(case: dict[str, Any], size: str, form: str) -> float:
    return float(case["rows"][size][form]["step_ms"]["median"])


def _error_ratio(errors: dict[str, list[float]]) -> float:
    """Of the errors of ours and of eager's calls: means, for single calls scatter."""
    return round(statistics.mean(errors["ours"]) / statistics.mean(errors["eager"]), 3)


def _transformers(*names: str) -> tuple[str, ...]:
    return tuple(f"transformer_{name}" for name in names)


def _transformer_speedups() -> dict[str, Figure]:
    """Figures of single transformers: by the name, the case, the size and the bar."""
    bars = {
        "zimage_1024_speedup": ("zimage", "1024x1024x1", ">= 1.22"),
        "zimage_512_default_host_speedup": ("zimage", "512x512x1", ">= 1.7"),
        "flux1_1024_speedup": ("flux1", "1024x1024x1", ">= 1.31"),
        "flux1_512_default_host_speedup": ("flux1", "512x512x1", ">= 1.5"),
        "qwen_1328_speedup": ("qwen", "1328x1328x1", ">= 1.3"),
        "wan1_3b_480p_33f_speedup": ("wan1_3b", "832x480x9", ">= 1.33"),
        "wan14b_480p_81f_speedup": ("wan14b", "832x480x21", ">= 1.35"),
        "klein4b_1024_speedup": ("klein4b", "1024x1024x1", ">= 1.22"),
        "krea2_1024_speedup": ("krea2", "1024x1024x1", ">= 1.22"),
        "zimage_int8_1024_speedup": ("zimage_int8", "1024x1024x1", ">= 1.2"),
        "flux1_int8_1024_speedup": ("flux1_int8", "1024x1024x1", ">= 1.25"),
        "flux1_fp8_1024_speedup": ("flux1_fp8", "1024x1024x1", ">= 1.35"),
        "qwen_fp8_1328_speedup": ("qwen_fp8", "1328x1328x1", ">= 1.3"),
        "wan14b_int8_480p_speedup": ("wan14b_int8", "832x480x9", ">= 1.3"),
        "wan14b_fp8_480p_81f_speedup": ("wan14b_fp8", "832x480x21", ">= 1.35"),
    }
    return {
        name: Figure("eager / ours", _transformers(case), _speedup(size), bar)
        for name, (case, size, bar) in bars.items()
    }


_SIX = _transformers("zimage", "flux1", "qwen", "wan1_3b", "klein4b", "krea2")
_LIGHT = _transformers("zimage", "flux1", "klein4b", "wan1_3b")
_QUANTISED = _transformers("zimage_int8", "flux1_int8", "flux1_fp8")
_USERS_RIVALS = ("users_run_rival_a", "users_run_rival_b")
_CHANGES = ("changes_default", "changes_off")
_FP16_FORMS = ("forms_default", "forms_off", "forms_sd15_default")
FIGURES: dict[str, Figure] = {
    **_transformer_speedups(),
    "dit_vs_per_block_torch_compile": Figure(
        "per block / ours", _SIX, _smallest_against_blocks, ">= 1.12", any_of=True
    ),
    "dit_cold_build_seconds": Figure(
        "s",
        _SIX,
        lambda *cases: max(case["ready_seconds"] for case in cases),
        "<= 25",
        any_of=True,
    ),
    "dit_builds_after_first": Figure(
        "builds", ("small_transformers",), lambda case: case["builds_after_first"], "== 0"
    ),
    "dit_exact_max_abs_diff": Figure(
        "latent",
        ("small_transformers", *_LIGHT),
        lambda *cases: max(case["exact_max_abs_diff"] for case in cases),
        "== 0",
        any_of=True,
    ),
    "dit_error_ratio": Figure(
        "ours / eager, against float32",
        _LIGHT,
        lambda *cases: max(_error_ratio(case["errors"]) for case in cases),
        "<= 1.1",
        any_of=True,
    ),
    "flux1_fp8_vs_bf16_eager": Figure(
        "bf16 eager / ours on fp8",
        _transformers("flux1", "flux1_fp8"),
        lambda bf16, fp8: round(
            _median(bf16, "1024x1024x1", "eager") / _median(fp8, "1024x1024x1", "ours"), 3
        ),
        ">= 1.7",
    ),
    "quantised_error_ratio": Figure(
        "ours / eager, against float32 of the same weights",
        _QUANTISED,
        lambda *cases: max(_error_ratio(case["errors"]) for case in cases),
        "<= 1.05",
        any_of=True,
    ),
    "zimage_first_image_ratio": Figure(
        "ours / eager", ("first_image_zimage",), lambda case: case["first_image_ratio"], "<= 1.0"
    ),
    "dit_peak_vram_ratio": Figure(
        "ours / eager",
        ("vram_six_zimage", "vram_six_flux1"),
        lambda *cases: max(case["peak_ratio"] for case in cases),
        "<= 1.1",
        any_of=True,
    ),
    "dit_disk_mb": Figure(
        "MB", _SIX, lambda *cases: round(sum(case["disk_mb"] for case in cases), 3), "<= 3"
    ),
    "sdxl_1024_default_host_regions_speedup": Figure(
        "eager / ours", ("speed_default",), _speedup("1024x1024"), ">= 1.5"
    ),
    "sdxl_1024_regions_speedup": Figure(
        "eager / ours", ("speed_off",), _speedup("1024x1024"), ">= 1.12"
    ),
    "builds_after_first": Figure(
        "builds", _CHANGES, lambda *cases: sum(case["builds_after_first"] for case in cases), "== 0"
    ),
    "max_rel_l2_fp16": Figure(
        "relative L2", (*_CHANGES, *_FP16_FORMS), _largest("max_rel_l2"), "<= 5e-3", any_of=True
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
        "eager / ours", ("vae_bf16",), _speedup("decode 1024x1024"), ">= 1.9"
    ),
    "vae_decode_2048_speedup": Figure(
        "eager / ours", ("vae_bf16",), _speedup("decode 2048x2048"), ">= 1.7"
    ),
    "vae_decode_1024_fp32_speedup": Figure(
        "eager / ours", ("vae_fp32",), _speedup("decode 1024x1024"), ">= 1.6"
    ),
    "vae_encode_1024_speedup": Figure(
        "eager / ours", ("vae_bf16",), _speedup("encode 1024x1024"), ">= 1.6"
    ),
    "vae_peak_ratio_1024": Figure(
        "ours / eager", ("vae_memory",), lambda case: case["peak_ratio"]["1024x1024"], "<= 0.8"
    ),
    "vae_peak_ratio_2048": Figure(
        "ours / eager", ("vae_memory",), lambda case: case["peak_ratio"]["2048x2048"], "<= 0.8"
    ),
    "video_vae_decode_speedup": Figure(
        "eager / ours", ("video_vae",), _speedup("decode 832x480, 17 frames"), ">= 1.1"
    ),
    "video_vae_encode_speedup": Figure(
        "eager / ours", ("video_vae",), _speedup("encode 832x480, 17 frames")
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
        "exact / ours", ("forms_default",), lambda case: _gpu_bound(case["rows"]["1024x1024"])
    ),
    "sdxl_1024_ksampler_default_host_speedup": Figure(
        "eager / ours",
        ("forms_default",),
        _images("any_shape"),
        ">= 1.8",
    ),
    "sdxl_1024_specialised_default_host_speedup": Figure(
        "eager / specialised",
        ("forms_default",),
        _form("1024x1024", "specialised_speedup"),
        ">= 1.95",
    ),
    "sdxl_512_specialised_default_host_speedup": Figure(
        "eager / specialised", ("forms_default",), _form("512x512", "specialised_speedup")
    ),
    "sdxl_1024_gpu_bound_speedup": Figure(
        "exact / specialised",
        ("forms_default",),
        _form("1024x1024", "gpu_bound_speedup"),
        ">= 1.35",
    ),
    "sdxl_1024_ksampler_specialised_default_host_speedup": Figure(
        "eager / specialised", ("forms_default",), _images("specialised")
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
            f"{rival} / specialised",
            ("rivals",),
            lambda case, rival=rival: case["ratios"][rival],
            bar,
        )
        for rival, bar in (
            ("torch_compile", ">= 1.2"),
            ("reduce_overhead", ">= 1.1"),
            ("per_block", ""),
        )
    },
    "sdxl_1024_kernels_vs_torch_compile": Figure(
        "torch_compile / specialised, kernels alone",
        ("rivals",),
        lambda case: round(
            case["kernel_ms"]["torch_compile"] / case["kernel_ms"]["specialised"], 3
        ),
    ),
    "vram_peak_ratio_six_signatures": Figure(
        "ours / eager", ("vram_six",), lambda case: case["peak_ratio"], "<= 1.15"
    ),
    "vae_decode_1024_specialised_speedup": Figure(
        "eager / specialised",
        ("vae_bf16",),
        lambda case: _specialised(case["rows"]["decode 1024x1024"]),
        ">= 2.4",
    ),
    "sdxl_bf16_1024_default_host_speedup": Figure(
        "eager / ours", ("forms_bf16_default",), _form("1024x1024", "any_shape_speedup")
    ),
    "sdxl_bf16_1024_specialised_default_host_speedup": Figure(
        "eager / specialised", ("forms_bf16_default",), _form("1024x1024", "specialised_speedup")
    ),
    "sdxl_bf16_1024_gpu_bound_speedup": Figure(
        "exact / specialised", ("forms_bf16_default",), _form("1024x1024", "gpu_bound_speedup")
    ),
    "sd15_512_default_host_speedup": Figure(
        "eager / ours", ("forms_sd15_default",), _form("512x512", "any_shape_speedup"), ">= 4.0"
    ),
    "sd15_512_specialised_default_host_speedup": Figure(
        "eager / specialised", ("forms_sd15_default",), _form("512x512", "specialised_speedup")
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
        lambda *cases: max(case["max_abs_diff_interval1"] for case in cases),
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
        "eager / ours", ("speed_default",), _speedup("512x512")
    ),
    "sdxl_512_regions_speedup": Figure("eager / ours", ("speed_off",), _speedup("512x512")),
    "sdxl_bf16_1024_default_host_regions_speedup": Figure(
        "eager / ours", ("speed_bf16_default",), _speedup("1024x1024")
    ),
    "sdxl_bf16_1024_regions_speedup": Figure(
        "eager / ours", ("speed_bf16_off",), _speedup("1024x1024")
    ),
    "sd15_512_default_host_regions_speedup": Figure(
        "eager / ours", ("speed_sd15_default",), _speedup("512x512")
    ),
    "sd15_512_regions_speedup": Figure("eager / ours", ("speed_sd15_off",), _speedup("512x512")),
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


def write_case(folder: Path, name: str, case: dict[str, Any]) -> None:
    """Write one case's file, with the date."""
    folder.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    _write(folder / f"{name}.json", {"name": name, "date": date, **case})


def collect(folder: Path) -> dict[str, dict[str, Any]]:
    """Make the headline from the case files; figures of failed or missing cases are left out."""
    cases: dict[str, dict[str, Any]] = {}
    for path in folder.glob("*.json"):
        if path.name != HEADLINE:
            cases[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    headline = {}
    for name, figure in FIGURES.items():
        used = [cases.get(case) for case in figure.cases]
        good = [case for case in used if case is not None and case.get("ok")]
        if not good or (len(good) != len(used) and not figure.any_of):
            continue
        if any(case.get("smoke") for case in good):
            continue
        try:
            value = figure.read(*good)
        except (KeyError, ValueError):  # a row that was stopped or never run
            continue
        if value is None:  # not measured on this machine
            continue
        headline[name] = {
            "value": value,
            "unit": figure.unit,
            "gpu": good[-1]["gpu"],
            "torch": good[-1]["torch"],
            "host": good[-1]["host"],
            "date": good[-1]["date"],
        }
    if headline:
        _write(folder / HEADLINE, headline)
    return headline


def table(folder: Path, names: list[str]) -> list[str]:
    """A short table: each case with its outcome, then the headline with its bars."""
    lines = []
    for name in names:
        path = folder / f"{name}.json"
        if not path.exists():
            lines.append(f"{name:24} not run")
            continue
        case = json.loads(path.read_text(encoding="utf-8"))
        outcome = "ok" if case.get("ok") else f"FAILED: {case.get('reason', '')[:150]}"
        lines.append(f"{name:24} {case.get('seconds', 0):6.0f} s  {outcome}")
        lines += [f"    {line}" for line in case.get("lines", [])]
    for name, entry in collect(folder).items():
        bar = FIGURES[name].bar
        lines.append(f"{name:44} {entry['value']!s:>10} {entry['unit']:16} {bar}".rstrip())
    return lines


def _write(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1, sort_keys=False) + "\n", encoding="utf-8")
    os.replace(part, path)
