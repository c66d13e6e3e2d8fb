"""The benchmark's own arithmetic: errors, and a headline that leaves out what failed."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from warmgraph_tools.by_path import load

ROOT = Path(__file__).resolve().parents[2]
ALIAS = "warmgraph_benchmarks"


@pytest.fixture(scope="module")
def benchmarks() -> ModuleType:
    if ALIAS not in sys.modules:
        load(ALIAS, ROOT / "dev" / "benchmarks")
    for name in (
        "lab",
        "measure",
        "part_cases",
        "results",
        "rival_cases",
        "stages_case",
        "tasks",
        "users_run_case",
    ):
        importlib.import_module(f"{ALIAS}.{name}")
    return sys.modules[ALIAS]


def _case(**fields: object) -> dict[str, object]:
    facts = {
        "ok": True,
        "smoke": False,
        "gpu": "a GPU",
        "torch": "2.11.0",
        "host": "ComfyUI 0.30.0",
    }
    return {**facts, **fields}


def test_relative_error_is_that_of_the_norms_and_nan_never_passes(benchmarks: ModuleType) -> None:
    reference = torch.tensor([3.0, 4.0])
    rel_l2 = benchmarks.measure.rel_l2
    assert rel_l2(reference + torch.tensor([0.0, 0.5]), reference) == pytest.approx(0.1)
    assert rel_l2(torch.tensor([3.0, math.nan]), reference) == math.inf
    assert rel_l2(torch.ones(3), reference) == math.inf


def test_headline_sums_builds_over_both_modes_and_takes_the_worst_error_of_any_form(
    benchmarks: ModuleType, tmp_path: Path
) -> None:
    write, collect = benchmarks.results.write_case, benchmarks.results.collect
    write(tmp_path, "changes_default", _case(builds_after_first=0, max_rel_l2=1e-3))
    one = collect(tmp_path)
    assert set(one) == {"max_rel_l2_fp16"}, "one mode alone must not stand for both"
    assert one["max_rel_l2_fp16"]["value"] == 1e-3, "the worst that is known"
    write(tmp_path, "changes_off", _case(builds_after_first=2, max_rel_l2=4e-3))
    assert set(collect(tmp_path)) == {"builds_after_first", "max_rel_l2_fp16"}
    for name, error in (("default", 1e-3), ("off", 4.5e-3), ("sd15_default", 0.0)):
        write(tmp_path, f"forms_{name}", _case(max_rel_l2=error, rows={}, new_size={}))
    headline = collect(tmp_path)
    assert headline["builds_after_first"]["value"] == 2
    assert headline["max_rel_l2_fp16"]["value"] == 4.5e-3
    assert set(headline["max_rel_l2_fp16"]) == {"value", "unit", "gpu", "torch", "host", "date"}
    assert json.loads((tmp_path / "headline.json").read_text()) == headline


@pytest.mark.parametrize("fields", [{"ok": False, "reason": "x"}, {"smoke": True}])
def test_failed_and_smoke_cases_make_no_figure(
    benchmarks: ModuleType, tmp_path: Path, fields: dict[str, object]
) -> None:
    case = {**_case(build_seconds=1.0, disk_mb=1.0), **fields}
    benchmarks.results.write_case(tmp_path, "cold_build", case)
    assert benchmarks.results.collect(tmp_path) == {}


def test_another_hosts_figures_never_stand_for_the_usual_ones(
    benchmarks: ModuleType, tmp_path: Path
) -> None:
    name = benchmarks.results.case_name
    assert name("transformer_zimage_int8", "0.30.0") == "transformer_zimage_int8"
    assert name("transformer_zimage_int8", None) == "transformer_zimage_int8"
    case = _case(rows={"1024x1024x1": {"speedup": 1.3}}, errors={"ours": [1.0], "eager": [1.0]})
    file = name("transformer_zimage_int8", "0.33.0")
    benchmarks.results.write_case(tmp_path, file, case)
    found = benchmarks.results.collect(tmp_path)
    assert set(found) == {"host033_zimage_int8_speedup"}
    assert found["host033_zimage_int8_speedup"]["value"] == 1.3


@pytest.mark.parametrize(
    ("eager", "ours", "expected"),
    [
        ((0.2, 0.1), (0.5, 0.1), 0.3),
        ((0.2, 0.1), (0.2, 0.1), 0.0),
        ((0.5, 0.0), (0.2, 0.4), 0.4),  # eager's slow size hides nothing at another one
        ((-0.7, 0.0), (0.2, 0.0), 0.2),  # noise of eager's is no debt of ours
    ],
)
def test_new_size_costs_what_eager_does_not_pay_there_and_no_less_than_nothing(
    benchmarks: ModuleType, eager: tuple[float, float], ours: tuple[float, float], expected: float
) -> None:
    extras = {"eager": eager, "ours": ours}
    rows = {name: {"a": {"extra": a}, "b": {"extra": b}} for name, (a, b) in extras.items()}
    assert benchmarks.part_cases.new_size_extra(rows) == pytest.approx(expected)


def test_stopped_rival_is_written_as_beyond_its_limit(
    benchmarks: ModuleType, tmp_path: Path
) -> None:
    benchmarks.results.write_case(tmp_path, "rival_dynamic", _case(limit_s=240.0, rows={}))
    headline = benchmarks.results.collect(tmp_path)
    assert headline["sdxl_1024_torch_compile_dynamic_seconds"]["value"] == "> 240"


def test_child_output_yields_answer_last_partial_and_host_even_of_a_stopped_child(
    benchmarks: ModuleType,
) -> None:
    lines = [
        '{"host": {"gpu": "G"}}',
        '{"partial": {"n": 1}}',
        "noise {",
        '{"partial": {"n": 2}}',
        '{"ok": true}',
    ]
    assert benchmarks.lab._parse("\n".join(lines)) == ({"ok": True}, {"n": 2}, {"gpu": "G"})
    assert benchmarks.lab._parse("\n".join(lines[:2])) == (None, {"n": 1}, {"gpu": "G"})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_per_fused_convolution_silu_0", "ours"),
        ("void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16>", "layout"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution"),
        (
            "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>",
            "copy",
        ),
        ("void at::native::vectorized_elementwise_kernel<8, silu_kernel>", "element-wise"),
        ("void at::native::reduce_kernel<512, 1, NormTwoOps<float>>", "reduction"),
        ("sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64", "linear"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_f16_knob_7", "attention"),
        ("void comfy::quantize_int8_rowwise_convrot64_kernel<__nv_bfloat16>", "quantisation"),
        ("quantise_rows", "quantisation"),
        ("something_else", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(benchmarks: ModuleType, name: str, kind: str) -> None:
    assert benchmarks.kernels.kernel_class(name) == kind
