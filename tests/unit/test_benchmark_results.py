"""The benchmark's own arithmetic: errors, medians, and a headline that leaves out what failed."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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


def test_summary_is_a_median_and_not_a_mean(benchmarks: ModuleType) -> None:
    assert benchmarks.measure.summary([1.0, 2.0, 3.0, 100.0, 2.0])["median"] == 2.0


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


def _memory_case(**fields: object) -> dict[str, object]:
    ratios = {"1024x1024": 0.7, "2048x2048": 0.6}
    return _case(**{"peak_ratio": ratios, "new_size_extra_seconds": 0.0, **fields})


def test_vae_and_controlnet_figures_have_the_bars_of_their_issue(benchmarks: ModuleType) -> None:
    bars = {
        "vae_decode_1024_speedup": ">= 1.9",
        "vae_decode_2048_speedup": ">= 1.7",
        "vae_decode_1024_fp32_speedup": ">= 1.6",
        "vae_encode_1024_speedup": ">= 1.6",
        "vae_peak_ratio_1024": "<= 0.8",
        "vae_peak_ratio_2048": "<= 0.8",
        "vae_new_size_extra_seconds": "<= 0.3",
        "controlnet_step_speedup": ">= 1.4",
        "controlnet_unet_step_speedup": ">= 1.45",
    }
    assert {name: benchmarks.results.FIGURES[name].bar for name in bars} == bars


def test_forms_are_compared_with_eager_and_with_the_hosts_own_replayed_forward(
    benchmarks: ModuleType, tmp_path: Path
) -> None:
    milliseconds = {"eager": 90.0, "exact": 60.0, "any_shape": 45.0}
    row: dict[str, object] = {
        name: {"unet_ms": {"median": ms}, "ksampler_seconds": ms / 45}
        for name, ms in milliseconds.items()
    }
    row |= {"exact_speedup": 1.5, "any_shape_speedup": 2.0}
    row |= {"gpu_bound_speedup": 1.5}  # that of older results, against a form that is no more
    case = _case(
        rows={"1024x1024": row, "512x512": row}, image_end_to_end={"speedup": 2.1}, new_size={}
    )
    for name in ("forms_default", "forms_sd15_default"):
        benchmarks.results.write_case(tmp_path, name, case)
    found = {n: entry["value"] for n, entry in benchmarks.results.collect(tmp_path).items()}
    assert found["sdxl_1024_default_host_speedup"] == 2.0
    assert found["sdxl_1024_exact_default_host_speedup"] == 1.5
    assert found["sdxl_1024_gpu_bound_any_shape_speedup"] == 1.333
    assert found["sd15_1024_gpu_bound_any_shape_speedup"] == 1.333
    assert found["sdxl_1024_ksampler_default_host_speedup"] == 2.0
    assert found["image_end_to_end_default_host_speedup"] == 2.1
    assert "exact_max_abs_diff" not in found and "max_rel_l2_fp16" not in found


def test_peak_that_was_not_measured_makes_no_figure(benchmarks: ModuleType, tmp_path: Path) -> None:
    benchmarks.results.write_case(tmp_path, "vae_memory", _memory_case())
    assert benchmarks.results.collect(tmp_path)["vae_peak_ratio_2048"]["value"] == 0.6
    unmeasured = _memory_case(peak_ratio={"1024x1024": None, "2048x2048": None})
    benchmarks.results.write_case(tmp_path, "vae_memory", unmeasured)
    headline = benchmarks.results.collect(tmp_path)
    assert set(headline) == {"vae_new_size_extra_seconds"}


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
    benchmarks: ModuleType,
    eager: tuple[float, float],
    ours: tuple[float, float],
    expected: float,
) -> None:
    extras = {"eager": eager, "ours": ours}
    rows = {name: {"a": {"extra": a}, "b": {"extra": b}} for name, (a, b) in extras.items()}
    assert benchmarks.part_cases.new_size_extra(rows) == pytest.approx(expected)


@pytest.mark.parametrize("by_pieces", [False, True])
def test_marks_find_the_models_call_and_leave_the_vae_as_it_was(
    benchmarks: ModuleType, by_pieces: bool
) -> None:
    class Patcher:
        def get_free_memory(self, device: object) -> int:
            return 1

    class VAE:
        def __init__(self) -> None:
            self.patcher = Patcher()
            self.process_input = self.process_output = lambda image: image
            self.first_stage_model = SimpleNamespace(comfy_has_chunked_io=by_pieces)

        def vae_output_dtype(self) -> str:
            return "float32"

        def decode(self, latent: object) -> object:
            self.patcher.get_free_memory(None)  # while it loads
            self.patcher.get_free_memory(None)
            return latent, self.vae_output_dtype(), self.process_output(self.vae_output_dtype())

        def encode(self, image: object) -> object:
            return self.process_input(image), self.vae_output_dtype()

    vae = VAE()
    before = dict(vars(vae))
    for work in ("decode", "encode"):
        with benchmarks.tasks.vae.marked(vae, work) as marks:
            getattr(vae, work)("given")
        assert len(marks) == 2
        assert marks[0] <= marks[1]
        assert vars(vae) == before
        assert vars(vae.patcher) == {}


def test_stopped_rival_is_written_as_beyond_its_limit(
    benchmarks: ModuleType, tmp_path: Path
) -> None:
    benchmarks.results.write_case(tmp_path, "rival_dynamic", _case(limit_s=240.0, rows={}))
    headline = benchmarks.results.collect(tmp_path)
    assert headline["sdxl_1024_torch_compile_dynamic_seconds"]["value"] == "> 240"


class _Stopped:
    """A lab whose child is stopped at its limit with what it had found by then."""

    smoke = False

    def __init__(self, error: type[Exception], found: dict[str, object]) -> None:
        self._error, self._found = error, found

    def model(self, kind: str) -> str:
        return kind

    kind = store = model

    def pixels(self, *sides: int) -> list[int]:
        return list(sides)

    def workers(self, count: int) -> int:
        return count

    def run(self, task: str, flags: object, **_: object) -> object:
        raise self._error("stopped", self._found, stopped=True)  # type: ignore[call-arg]


def test_rivals_that_were_compiled_in_time_are_compared_and_the_others_left_out(
    benchmarks: ModuleType, tmp_path: Path
) -> None:
    milliseconds = {"eager": 90.0, "any_shape": 40.0, "torch_compile": 60.0}
    found = {
        "row": {name: {"unet_ms": {"median": ms}} for name, ms in milliseconds.items()},
        "speedups": {"any_shape": 2.25, "torch_compile": 1.5},
        "ratios": {"torch_compile": 1.5},
        "kernel_ms": {"eager": 44.0, "any_shape": 30.0, "torch_compile": 36.0},
        "compile_seconds": {"torch_compile": 80.0},
        "failed": {},
        "compiling": "reduce_overhead",
    }
    result = benchmarks.rival_cases.rivals(_Stopped(benchmarks.lab.ChildError, found))
    assert result["partial"] == "stopped"
    benchmarks.results.write_case(tmp_path, "rivals", _case(**result))
    headline = benchmarks.results.collect(tmp_path)
    assert {n: e["value"] for n, e in headline.items()} == {
        "sdxl_1024_vs_torch_compile": 1.5,
        "sdxl_1024_kernels_vs_torch_compile": 1.2,
    }
    with pytest.raises(benchmarks.lab.ChildError):
        benchmarks.rival_cases.rivals(_Stopped(benchmarks.lab.ChildError, {}))


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


ROW_NAMES = ("1024x1024", "1024x1152", "1536x1536")


class _Rival:
    """A lab whose children stop where they are told to."""

    smoke = False

    def __init__(self, errors: ModuleType, over: str, seconds: float = 1e6) -> None:
        self._errors, self._over, self.seconds = errors, over, seconds
        self.children: list[list[str]] = []

    def left(self) -> float:
        return self.seconds

    def folder(self, name: str) -> str:
        return name

    def model(self, kind: str) -> str:
        return kind

    kind = model

    def pixels(self, *sides: int) -> list[int]:
        return list(sides)

    def run(self, task: str, flags: object, *, rows: list[dict[str, str]], **_: object) -> object:
        names = [row["name"] for row in rows]
        self.children.append(names)
        made: dict[str, object] = {}
        for name in names:
            if name == self._over:
                partial = {"rows": made, "row": name}
                raise self._errors.ChildError("stopped", partial, stopped=True)
            made[name] = {"seconds": 90.0, "builds": 2}
        return {"rows": made}


def _rival(benchmarks: ModuleType, lab: _Rival) -> dict[str, Any]:
    case = benchmarks.users_run_case
    run = case.users_run_rival("a", case.ROWS[:3], restart=True)
    return dict(run(lab))


def test_a_rivals_row_over_its_limit_is_written_and_a_new_process_goes_on(
    benchmarks: ModuleType,
) -> None:
    lab = _Rival(benchmarks.lab, over="1024x1152")
    result = _rival(benchmarks, lab)
    restart = benchmarks.users_run_case.RESTART.name
    assert lab.children == [list(ROW_NAMES), ["1536x1536"], [restart]]
    assert result["rows"]["1024x1152"] == {"seconds": None, "over": 240.0}
    assert "| 1024x1152 | > 240 | - | - |" in result["lines"]
    assert benchmarks.users_run_case.total(result["rows"].values()) == "> 510"


def test_a_rivals_rows_that_no_time_was_left_for_are_not_counted_as_slow(
    benchmarks: ModuleType, tmp_path: Path
) -> None:
    lab = _Rival(benchmarks.lab, over="1024x1152", seconds=0.0)
    result = _rival(benchmarks, lab)
    assert result["rows"]["1024x1024"]["seconds"] == 90.0
    assert all("not_run" in result["rows"][name] for name in ROW_NAMES[1:])
    for name in ("users_run_rival_a", "users_run_rival_b"):
        benchmarks.results.write_case(tmp_path, name, _case(**result))
    assert benchmarks.results.collect(tmp_path) == {}


def test_the_users_table_joins_its_case_files(benchmarks: ModuleType, tmp_path: Path) -> None:
    write, case = benchmarks.results.write_case, benchmarks.users_run_case
    row = {"seconds": 2.0, "builds": 0, "peak_mib": 2048, "again": {"seconds": 1, "peak_mib": 1024}}
    runs = {"eager": {"rows": {"1024x1024": row}}, "ours": {"rows": {"1024x1024": row}}}
    write(tmp_path, "users_run", _case(runs=runs))
    for part in "ab":
        rows = {f"row {part}": {"seconds": 3.0, "builds": 2, "peak_mib": None}}
        write(tmp_path, f"users_run_rival_{part}", _case(rows=rows))
    assert case.joint_table(tmp_path)[2:] == [
        "| 1024x1024 | 2.00 (1.00) | 2.00 (1.00) | - | 0 / 0 / - | 2.0 (1.0) / 2.0 (1.0) / - |",
        "| row a | - | - | 3.00 | - / - / 2 | - / - / - |",
        "| row b | - | - | 3.00 | - / - / 2 | - / - / - |",
    ]


class _Child:
    """A child that reports at set moments and never ends; waiting for it takes no time."""

    def __init__(self, output: Path, moments: list[float]) -> None:
        self.output, self.moments, self.now = output, moments, 0.0
        output.touch()

    def monotonic(self) -> float:
        return self.now

    def wait(self, timeout: float) -> int:
        self.now += timeout
        rows = [{"partial": {"row": row}} for row, at in enumerate(self.moments) if at <= self.now]
        self.output.write_text("\n".join(map(json.dumps, rows)))
        raise subprocess.TimeoutExpired("child", timeout)


def test_a_child_has_its_time_again_after_each_of_its_parts(
    benchmarks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = benchmarks.lab
    child = _Child(tmp_path / "log.out", [0.1, 0.7, 1.3])
    monkeypatch.setattr(lab, "time", child)
    assert lab._wait(child, child.output, 60.0, 1.0) is None
    assert lab._parse(child.output.read_text())[1] == {"row": 2}
    assert 1.3 + 1.0 <= child.now <= 1.3 + 1.0 + lab.POLL_S


def test_a_child_is_stopped_when_one_of_its_parts_takes_too_long(
    benchmarks: ModuleType, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    _, code = benchmarks.lab._run(command, {}, tmp_path / "log.log", 600.0, 0.2)
    assert code is None


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


def test_a_templates_shares_are_of_its_whole_time_with_what_is_compiled(
    benchmarks: ModuleType,
) -> None:
    steps = [{"name": "passes", "calls": 20, "seconds": 0.4, "transformer_seconds": 0.2}]
    decode = {"name": "decode", "calls": 1, "seconds": 2.0, "compiled_seconds": 1.0}
    text = {"name": "text encoder", "calls": 2, "seconds": 0.5}
    run = benchmarks.stages_case._whole([text, decode], (steps, {}))
    assert run["seconds"] == {"eager": 11.0, "transformer_compiled": 7.0, "compiled": 6.0}
    assert run["shares"]["eager"]["decode"] == pytest.approx(2 / 11, abs=1e-4)
    assert run["shares"]["transformer_compiled"]["decode"] == pytest.approx(2 / 7, abs=1e-4)
    assert run["shares"]["compiled"]["decode"] == pytest.approx(1 / 6, abs=1e-4)


def test_every_templates_steps_were_measured(benchmarks: ModuleType) -> None:
    for template in benchmarks.stages.TEMPLATES:
        for passes, cards in benchmarks.stages_case._runs(template).values():
            assert passes and all(each["seconds"] > 0.0 for each in passes)
            assert all(cards.values())
