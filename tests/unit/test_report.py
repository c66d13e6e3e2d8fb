"""A report in words: what runs compiled, what does not and why."""

from __future__ import annotations

import copy
from typing import Any

from warmgraph_backends.sessions.report import render_text

REPORT: dict[str, Any] = {
    "id": "model-1",
    "model": "SDXL",
    "backend": "inductor",
    "when_missing": "background",
    "graphs": "",
    "regions": {"total": 203, "compiled": 200, "eager": 3},
    "eager": [{"reason": "another node patches attn2_patch", "places": 3, "examples": ["a", "b"]}],
    "kinds": [],
    "builds": 2,
    "loads": 21,
    "reused": 4,
    "calls": {"compiled": 4000, "eager": 0},
    "captured": {
        "signatures": 2,
        "captures": 3,
        "replayed": 180,
        "vram_bytes": 416 * 2**20,
        "not_replayed": {"weights moved since the last step": 2},
    },
    "misses": [{"kind": "Upsample 64", "reason": "torch: made for 2.10"}],
    "disk_bytes": 12 * 2**20,
    "vram_bytes": 3 * 2**19,
    "seconds_saved": 41.2,
    "building": {"done": 3, "total": 5, "seconds_left": 7.4, "running": ["x"]},
    "notes": ["a note"],
}


def test_all_that_a_user_asks_is_said_once() -> None:
    lines = render_text(REPORT).splitlines()
    assert lines == [
        "SDXL: 200 of 203 regions compiled (inductor)",
        "  eager: 3 x another node patches attn2_patch",
        "         a, b",
        "building: 3 of 5, about 7 s left",
        "graphs: 2 built, 21 loaded, 4 in use before, 1 missing; 4000 calls compiled",
        "  missing: Upsample 64: torch: made for 2.10",
        "CUDA graphs: 2 sizes captured, 180 steps replayed, 416 MiB",
        "  2 steps not: weights moved since the last step",
        "disk 12.0 MiB, VRAM 1.5 MiB (kernels; weights are the host's own), "
        "41 s of compiling saved",
        "a note",
    ]


def test_nothing_is_said_of_builds_when_none_run() -> None:
    report = copy.deepcopy(REPORT)
    report["building"] = {"done": 5, "total": 5, "seconds_left": None, "running": []}
    assert "building" not in render_text(report)
    report["building"] = {"done": 0, "total": 5, "seconds_left": None, "running": []}
    assert "building: 0 of 5\n" in render_text(report)


NOTHING = {"signatures": 0, "captures": 0, "replayed": 0, "vram_bytes": 0, "not_replayed": {}}


def test_a_model_without_regions_is_only_its_note() -> None:
    report = {**REPORT, "regions": {"total": 0, "compiled": 0, "eager": 0}, "captured": NOTHING}
    assert render_text(report) == "a note"
    captured = {**report, "captured": REPORT["captured"]}
    assert render_text(captured).startswith("CUDA graphs: 2 sizes captured")
    assert render_text({**report, "notes": []}) == "nothing to report"
