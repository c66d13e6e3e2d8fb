"""The benchmark's own arithmetic: errors, medians, and a headline that leaves out what failed."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ALIAS = "warmgraph_benchmarks"


@pytest.fixture(scope="module")
def benchmarks() -> ModuleType:
    if ALIAS not in sys.modules:
        folder = ROOT / "benchmarks"
        spec = importlib.util.spec_from_file_location(
            ALIAS, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[ALIAS] = module
        spec.loader.exec_module(module)
    for name in ("lab", "measure", "results"):
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


def test_headline_sums_builds_over_both_modes_and_takes_the_worst_error(
    benchmarks: ModuleType, tmp_path: Path
) -> None:
    write, collect = benchmarks.results.write_case, benchmarks.results.collect
    write(tmp_path, "changes_default", _case(builds_after_first=0, max_rel_l2=1e-3))
    assert collect(tmp_path) == {}, "one mode alone must not stand for both"
    write(tmp_path, "changes_off", _case(builds_after_first=2, max_rel_l2=4e-3))
    headline = collect(tmp_path)
    assert headline["builds_after_first"]["value"] == 2
    assert headline["max_rel_l2_fp16"]["value"] == 4e-3
    assert set(headline["max_rel_l2_fp16"]) == {"value", "unit", "gpu", "torch", "host", "date"}
    assert json.loads((tmp_path / "headline.json").read_text()) == headline


@pytest.mark.parametrize("fields", [{"ok": False, "reason": "x"}, {"smoke": True}])
def test_failed_and_smoke_cases_make_no_figure(
    benchmarks: ModuleType, tmp_path: Path, fields: dict[str, object]
) -> None:
    case = {**_case(build_seconds=1.0, disk_mb=1.0), **fields}
    benchmarks.results.write_case(tmp_path, "cold_build", case)
    assert benchmarks.results.collect(tmp_path) == {}


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
