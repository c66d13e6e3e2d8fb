"""Captured calls on a real GPU: the same bits, through every change, and no harm when one fails."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu
MODES = {
    "dynamic": (),
    "legacy": ("--disable-dynamic-vram",),
    "native": ("--disable-cuda-malloc",),
}
SIZES = [[1024, 1024, 1], [512, 512, 1], [720, 960, 1], [584, 328, 3]]


@pytest.mark.parametrize("mode", MODES)
def test_exact_gives_eagers_bits(lab: Any, sdxl: dict[str, Any], mode: str) -> None:
    result = lab.run(
        "captured_exact",
        MODES[mode],
        limit_s=200,
        **sdxl,
        sizes=SIZES,
        loras={form: lab.lora("sdxl", form) for form in ("linear", "conv")},
    )
    for row in result["rows"]:
        assert row["finite"] and row["max_abs_diff"] == 0, row
        assert row["replayed"] >= 3, row
        assert row["pinned_pages"] == 0, row


def test_captures_go_on_with_a_torch_that_compiles_nothing(lab: Any, sdxl: dict[str, Any]) -> None:
    result = lab.run(
        "captured_exact",
        limit_s=200,
        **sdxl,
        sizes=SIZES[1:3],
        loras={form: lab.lora("sdxl", form) for form in ("linear", "conv")},
        form="auto",
        compiler=False,
    )
    (note,) = result["notes"]
    assert "has no standalone_compile" in note and "replayed as the host makes them" in note
    for row in result["rows"]:
        assert row["finite"] and row["max_abs_diff"] == 0 and row["replayed"] >= 3, row


@pytest.mark.parametrize("mode", MODES)
def test_a_call_that_cannot_be_captured_runs_as_ever(
    lab: Any, sdxl: dict[str, Any], mode: str
) -> None:
    waits = mode == "native"
    result = lab.run(
        "captured_failures", MODES[mode], limit_s=200, **sdxl, size=[512, 512], waits=waits
    )
    for name, row in result["rows"].items():
        assert row["max_abs_diff"] == 0, (name, row)
        assert row["replayed"] == 0 and row["reason"] in row["not_replayed"], (name, row)
    for good in (result["options"], result["afterwards"]):
        assert good["replayed"] > 0 and good["max_abs_diff"] == 0, good


def test_what_the_hosts_step_caches_compute_is_replayed(lab: Any, sdxl: dict[str, Any]) -> None:
    result = lab.run("step_cache", limit_s=420, **sdxl, size=[512, 512], forms=["exact"])
    assert len(result["rows"]) == 4
    for row in result["rows"]:
        assert row["computed"] < row["steps"], row
        assert row["share"] >= 0.9 and row["max_abs_diff"] == 0, row


@pytest.mark.slow
def test_a_soak_of_changes_stays_right_and_builds_nothing(lab: Any, sdxl: dict[str, Any]) -> None:
    """A short slice; `python -m dev.benchmarks --only soak_0,...` runs the long ones."""
    result = lab.run(
        "soak",
        limit_s=420,
        **sdxl,
        second_model=lab.model("sdxl", seed=1),
        loras={form: lab.lora("sdxl", form) for form in ("linear", "conv")},
        control=lab.controlnet("sdxl"),
        seed=99,
        prompts=30,
    )
    assert result["builds"] == 0
    assert result["failing"] == [] and result["max_rel_l2"] <= 5e-3
    assert result["replayed"] > 0
