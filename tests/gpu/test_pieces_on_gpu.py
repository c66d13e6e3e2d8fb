"""Blocks replayed one by one on a real GPU: the bits of calls, in each mode, beside changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from warmgraph_tools.by_path import load

pytestmark = pytest.mark.gpu
MODES = {
    "dynamic": (),
    "legacy": ("--disable-dynamic-vram",),
    "native": ("--disable-cuda-malloc",),
}
#: Their sizes as `transformers.sample` takes them.
MODELS = {"small_flux1": [512, 512, 1], "small_ltx23": [256, 256, 4, 1, 1]}
#: Of each process: several build at once.
BUILD_WORKERS = 6


@pytest.mark.parametrize("mode", MODES)
def test_replayed_blocks_give_the_bits_of_calls(lab: Any, mode: str) -> None:
    """Under no override, and under one that is known, whole steps of Flux are
    replayed; of LTX none.
    """
    result = lab.run(
        "pieces_of_each",
        MODES[mode],
        limit_s=500,
        models=MODELS,
        stores={name: lab.store(f"pieces-{name}") for name in MODELS},
        overrides=["unknown", "known", ""],
        workers=BUILD_WORKERS,
    )
    assert len(result["rows"]) == 3 * len(MODELS)
    for row in result["rows"]:
        assert row["max_abs_diff"] == 0, row
        assert row["rel_l2"] <= 5e-2, row
        pieces, whole = row["captured"]["pieces"], row["captured"]["replayed"]
        if row["name"] == "small_flux1" and row["override"] != "unknown":
            assert whole > 0 and pieces["replayed"] == 0, row
            continue
        assert pieces["replayed"] > 0 and whole == 0 and not pieces["refused"], row
        assert bool(pieces["cuts"]) == (row["override"] == "unknown"), row
        ours, calls = (row["calls"][form] for form in ("ours", "calls"))
        assert ours == calls, row


def test_blocks_are_replayed_around_an_attention_that_they_are_given(
    lab: Any, host_tree: Path, run_folder: Path
) -> None:
    """On an imitated newer ComfyUI; the function has state, and eager calls it as often."""
    load("engine_tests", Path(__file__).resolve().parents[1] / "engine")
    from engine_tests import newer_tree

    tree = newer_tree.make_or_skip(host_tree, run_folder / "giving")
    newer = type(lab)(tree, lab.work)
    [row] = newer.run(
        "pieces_of_each",
        limit_s=500,
        models={"small_h3": [512, 512, 4]},
        stores={"small_h3": newer.store("pieces-given-h3")},
        overrides=["given"],
        workers=BUILD_WORKERS,
    )["rows"]
    assert row["max_abs_diff"] == 0 and row["rel_l2"] <= 5e-2, row
    pieces = row["captured"]["pieces"]
    assert row["captured"]["replayed"] == 0 < pieces["replayed"] and pieces["cuts"], row
    assert not pieces["refused"] and row["calls"]["ours"] == row["calls"]["eager"] > 0, row


@pytest.mark.slow
def test_a_soak_of_changes_gives_the_bits_of_calls(lab: Any) -> None:
    """Sizes, batches, overrides, LoRAs, cancels and two models, drawn from a seed."""
    result = lab.run(
        "pieces_soak",
        limit_s=560,
        names=["small_flux1", "small_zimage"],
        store=lab.store("pieces-soak"),
        seed=11,
        prompts=300,
        workers=BUILD_WORKERS,
    )
    assert result["prompts"] == 300 and result["builds"] == 0
    assert result["failing"] == [] and result["max_abs_diff"] == 0
    assert result["replayed"] > 0 and result["cancelled"] > 0
    assert result["vram_mib_per_100_prompts"] <= 20, result


@pytest.mark.slow
def test_a_cancel_ends_a_long_step_soon(lab: Any) -> None:
    result = lab.run(
        "interrupt",
        limit_s=300,
        name="small_flux1",
        path="",
        store=lab.store("pieces-small_flux1"),
        size=[4096, 4096, 1, 8],
        workers=BUILD_WORKERS,
    )
    assert result["ours_seconds"] <= max(0.4, 0.3 * result["step_seconds"]), result
