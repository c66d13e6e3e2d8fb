"""DeepCache on a real GPU, with and without Compile Model: same images, nothing built for it."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu
MODES = {"dynamic": (), "legacy": ("--disable-dynamic-vram",)}
#: Of final latents: the errors of single calls add up over a run.
RUN_TOLERANCE = 1e-2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [[1024, 1024], [720, 960]], ids=str)
def test_both_sorts_of_steps_are_replayed_and_right(
    lab: Any, sdxl: dict[str, Any], mode: str, size: list[int]
) -> None:
    result = lab.run("deepcache", MODES[mode], limit_s=200, **sdxl, size=size, images=1)
    assert result["left_wrong"] == {"by_compiled": [], "by_all": []}
    assert result["max_abs_diff_eager_again"] == 0, result
    assert result["max_abs_diff_interval1"] == 0, result
    assert max(result["rel_l2_compiled"].values()) <= RUN_TOLERANCE, result["rel_l2_compiled"]
    assert result["builds_by_deepcache"] == 0 and result["captures_by_interval"] == 0
    for order in ("both", "both_swapped"):
        captured, cache = (result["reports"][order][key] for key in ("captured", "deepcache"))
        assert captured["replayed"] > 0 and captured["captures"] >= 2, captured
        assert cache["problem"] is None and cache["seconds_saved"] > 0
        assert result["reports"][order]["not_ready"] == []
