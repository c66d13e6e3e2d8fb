"""Headline figures of diffusion transformers and of quantised files, with their bars."""

from __future__ import annotations

import statistics
from typing import Any

from .figure import Figure, largest, speedup
from .memory_cases import QUANTISED_CARDS
from .pieces_case import PIECES


def _smallest_against_blocks(*cases: dict[str, Any]) -> float:
    """Over the first sizes of all that were measured."""
    rows = [next(iter(case["rows"].values())) for case in cases]
    return min(float(row["vs_per_block_torch_compile"]) for row in rows)


def _median(case: dict[str, Any], size: str, form: str) -> float:
    return float(case["rows"][size][form]["step_ms"]["median"])


def _largest_error_ratio(*cases: dict[str, Any]) -> float:
    """Of the errors of ours and of eager's calls: means, for single calls scatter."""
    means = [{form: statistics.mean(e) for form, e in case["errors"].items()} for case in cases]
    return max(round(each["ours"] / each["eager"], 3) for each in means)


def _transformers(*names: str) -> tuple[str, ...]:
    return tuple(f"transformer_{name}" for name in names)


def _transformer_speedups() -> dict[str, Figure]:
    """Figures of single transformers: by the name, the case, the size and the bar."""
    bars = {
        "zimage_1024_speedup": ("zimage", "1024x1024x1", ">= 1.3"),
        "zimage_512_default_host_speedup": ("zimage", "512x512x1", ">= 1.7"),
        "flux1_1024_speedup": ("flux1", "1024x1024x1", ">= 1.42"),
        "flux1_512_default_host_speedup": ("flux1", "512x512x1", ">= 1.5"),
        "qwen_1328_speedup": ("qwen", "1328x1328x1", ">= 1.3"),
        "wan1_3b_480p_33f_speedup": ("wan1_3b", "832x480x9", ">= 1.33"),
        "wan14b_480p_81f_speedup": ("wan14b", "832x480x21", ">= 1.42"),
        "klein4b_1024_speedup": ("klein4b", "1024x1024x1", ">= 1.22"),
        "krea2_1024_speedup": ("krea2", "1024x1024x1", ">= 1.22"),
        "zimage_int8_1024_speedup": ("zimage_int8", "1024x1024x1", ">= 1.75"),
        "zimage_int8_512_default_host_speedup": ("zimage_int8", "512x512x1", ""),
        "flux1_int8_1024_speedup": ("flux1_int8", "1024x1024x1", ">= 1.25"),
        "flux1_fp8_1024_speedup": ("flux1_fp8", "1024x1024x1", ">= 1.35"),
        "flux2_fp8_1024_speedup": ("flux2_fp8", "1024x1024x1", ">= 1.35"),
        "qwen_fp8_1328_speedup": ("qwen_fp8", "1328x1328x1", ">= 1.3"),
        "wan14b_int8_480p_speedup": ("wan14b_int8", "832x480x9", ">= 1.3"),
        "wan14b_fp8_480p_81f_speedup": ("wan14b_fp8", "832x480x21", ">= 1.35"),
        "flux1_int8_lora_speedup": ("flux1_int8_lora", "1024x1024x1", ">= 1.4"),
        "flux1_fp8_lora_speedup": ("flux1_fp8_lora", "1024x1024x1", ">= 1.4"),
        "gguf_flux1_512_speedup": ("flux1_gguf", "512x512x1", ">= 1.5"),
        "gguf_flux1_1024_speedup": ("flux1_gguf", "1024x1024x1", ""),
        "gguf_lora_flux1_512_speedup": ("flux1_gguf_lora", "512x512x1", ""),
        "ltx23_fp8_i2v_14080_speedup": ("ltx23_fp8", "1280x704x16x1x1", ">= 1.5"),
        "ltx23_fp8_i2v_3520_speedup": ("ltx23_fp8", "640x352x16x1x1", ">= 3.2"),
        "ltx23_fp8_t2v_14080_speedup": ("ltx23_fp8", "1280x704x16", ""),
        "ltx23_bf16_i2v_14080_speedup": ("ltx23", "1280x704x16x1x1", ">= 1.4"),
        "ltx23_bf16_t2v_14080_speedup": ("ltx23", "1280x704x16", ""),
        "ltx25_int8_i2v_14080_speedup": ("ltx25_int8-host0.33", "1280x704x16x1x1", ""),
        "h3_int8_15700_speedup": ("h3_int8", "864x480x37", ">= 1.28"),
        "h3_int8_7600_speedup": ("h3_int8", "896x512x17", ">= 1.22"),
        "qwen21_int8_1024_speedup": ("qwen21_int8-host0.33", "1024x1024x1", ">= 1.5"),
        "qwen21_int8_2048_speedup": ("qwen21_int8-host0.33", "2048x2048x1", ""),
        "qwen21_fp8_1024_speedup": ("qwen21_fp8-host0.33", "1024x1024x1", ""),
        "qwen21_1024_speedup": ("qwen21-host0.33", "1024x1024x1", ""),
        "ltx23_fp8_lora_speedup": ("ltx23_fp8_lora", "1280x704x16x1x1", ">= 1.4"),
        "flux1_int8_bypass_speedup": ("flux1_int8_bypass", "1024x1024x1", ""),
        "host033_zimage_int8_speedup": ("zimage_int8-host0.33", "1024x1024x1", ""),
        "host033_flux1_int8_speedup": ("flux1_int8-host0.33", "1024x1024x1", ""),
        "host033_flux1_fp8_speedup": ("flux1_fp8-host0.33", "1024x1024x1", ""),
        "host033_wan14b_int8_speedup": ("wan14b_int8-host0.33", "832x480x9", ""),
        "host033_h3_int8_15700_speedup": ("h3_int8-host0.33", "864x480x37", ""),
        "host033_krea2_speedup": ("krea2-host0.33", "1024x1024x1", ""),
    }
    return {
        name: Figure("eager / ours", _transformers(case), speedup(size), bar)
        for name, (case, size, bar) in bars.items()
    }


def _largest_peak_ratio(*cases: dict[str, Any]) -> float:
    rows = [row for case in cases for row in case["rows"].values()]
    return max(round(row["ours"]["peak_mib"] / row["eager"]["peak_mib"], 3) for row in rows)


_AV = _transformers("ltx23_fp8", "ltx23", "h3_int8")
_SIX = _transformers("zimage", "flux1", "qwen", "wan1_3b", "klein4b", "krea2")
_LIGHT = _transformers("zimage", "flux1", "klein4b", "wan1_3b")
_QUANTISED = _transformers("zimage_int8", "flux1_int8", "flux1_fp8")
_SMALL_CARDS = tuple(f"small_cards_{kind}" for kind in QUANTISED_CARDS)
_QUANTISED_SIX = ("vram_six_zimage_int8", "vram_six_flux1_fp8")
_PIECES = tuple(f"pieces_{name}" for name in PIECES)
TRANSFORMER_FIGURES: dict[str, Figure] = {
    **{
        f"flux1_512{name}_override_speedup": Figure(
            "eager / ours", (f"pieces_flux1_512_{case}",), lambda found: found["speedup"], bar
        )
        for name, case, bar in (("", "known", ">= 2.0"), ("_unknown", "unknown", ">= 1.7"))
    },
    "h3_given_attention_speedup": Figure(
        "eager / ours", ("pieces_h3_int8_15700_given",), lambda found: found["speedup"], ""
    ),
    "replayed_exact_max_abs_diff": Figure(
        "replayed blocks against calls", _PIECES, largest("max_abs_diff"), "== 0", any_of=True
    ),
    "replayed_peak_vram_ratio": Figure(
        "replayed blocks / calls",
        _PIECES,
        lambda *cases: max(
            round(case["peak_mib"]["ours"] / case["peak_mib"]["calls"], 3) for case in cases
        ),
        "<= 1.15",
        any_of=True,
    ),
    "interrupt_seconds": Figure("s", ("interrupt",), lambda case: case["ours_seconds"], "<= 0.4"),
    **_transformer_speedups(),
    "dit_vs_per_block_torch_compile": Figure(
        "per block / ours", _SIX, _smallest_against_blocks, ">= 1.12", any_of=True
    ),
    "dit_cold_build_seconds": Figure(
        "s",
        _SIX,
        largest("ready_seconds"),
        "<= 25",
        any_of=True,
    ),
    "easycache_replayed_share": Figure(
        "replayed / computed",
        ("easycache",),
        lambda case: case["easycache_replayed_share"],
        ">= 0.9",
    ),
    "dit_builds_after_first": Figure(
        "builds", ("small_transformers",), lambda case: case["builds_after_first"], "== 0"
    ),
    "av_builds_after_first": Figure(
        "builds",
        _AV,
        lambda *cases: sum(case["builds_after_first"] for case in cases),
        "== 0",
        any_of=True,
    ),
    "av_error_ratio": Figure(
        "ours / eager, against float32 of the same weights",
        _transformers("ltx23_few", "ltx23_few_fp8", "h3_few_int8"),
        _largest_error_ratio,
        "<= 1.1",
        any_of=True,
    ),
    "av_peak_vram_ratio": Figure("ours / eager", _AV, _largest_peak_ratio, "<= 1.05", any_of=True),
    "av_cold_build_seconds": Figure("s", _AV, largest("ready_seconds"), "<= 45", any_of=True),
    "dit_exact_max_abs_diff": Figure(
        "latent",
        ("small_transformers", *_LIGHT),
        largest("exact_max_abs_diff"),
        "== 0",
        any_of=True,
    ),
    "dit_error_ratio": Figure(
        "ours / eager, against float32",
        _LIGHT,
        _largest_error_ratio,
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
        _largest_error_ratio,
        "<= 1.05",
        any_of=True,
    ),
    "zimage_first_image_ratio": Figure(
        "ours / eager", ("first_image_zimage",), lambda case: case["first_image_ratio"], "<= 1.0"
    ),
    "dit_peak_vram_ratio": Figure(
        "ours / eager",
        ("vram_six_zimage", "vram_six_flux1"),
        largest("peak_ratio"),
        "<= 1.1",
        any_of=True,
    ),
    "small_card_slowest_ratio": Figure(
        "ours / eager",
        _SMALL_CARDS,
        largest("slowest_ratio"),
        "<= 0.85",
        any_of=True,
    ),
    "quantised_peak_vram_ratio": Figure(
        "ours / eager",
        _QUANTISED_SIX,
        largest("peak_ratio"),
        "<= 1.05",
        any_of=True,
    ),
    "quantised_builds_after_first": Figure(
        "builds",
        ("small_transformers",),
        lambda case: case["quantised_builds_after_first"],
        "== 0",
    ),
    "dit_disk_mb": Figure(
        "MB", _SIX, lambda *cases: round(sum(case["disk_mb"] for case in cases), 3), "<= 3"
    ),
}
