"""Captured calls beside other nodes' code on a GPU: right while it lasts, quick again after."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu
MODES = {"dynamic": (), "legacy": ("--disable-dynamic-vram",)}
#: Of final latents: the errors of single calls add up over a run.
RUN_TOLERANCE = 1e-2


@pytest.mark.parametrize("mode", MODES)
def test_what_others_do_is_neither_replayed_over_nor_lasting(
    lab: Any, sdxl: dict[str, Any], mode: str
) -> None:
    result = lab.run("beside", MODES[mode], limit_s=200, **sdxl, size=[512, 512])
    rows = {row["name"]: row for row in result["rows"]}
    for name, row in rows.items():
        assert row["error"] <= RUN_TOLERANCE, (name, row)
        if name == "plain" or name.startswith("after"):
            assert row["replayed"] > 0, (name, row)
    norms = rows["norms replaced on their classes"]
    assert norms["effect"] > 3 * RUN_TOLERANCE and norms["replayed"] == 0, norms
    assert any("replaces GroupNorm.forward" in reason for reason in norms["reasons"]), norms
    assert rows["after norms replaced on their classes"]["captures"] == 0
    # What was captured holds the dropped graph: the next calls are captured anew.
    assert rows["a dropped graph"]["captures"] == 1


def test_a_block_that_another_node_captures_is_the_hosts_and_named(lab: Any, gpu: None) -> None:
    result = lab.run(
        "foreign_capture",
        ("--disable-dynamic-vram", "--disable-cuda-malloc"),
        limit_s=290,
        store=lab.store("small-transformers"),
        workers=4,
    )
    assert result["captures"] > 0 and result["error"] <= RUN_TOLERANCE, result
    assert any("captures it into a CUDA graph" in reason for reason in result["reasons"]), result
    assert result["after"]["eager"] == 0, result
    assert result["after"]["error"] <= 2 * RUN_TOLERANCE, result
