"""A report in words: what runs compiled, what does not and why."""

from __future__ import annotations

import copy
from typing import Any

import pytest

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
    "speed": {"form": "compiled", "size": "", "ms": {"compiled": 31.2, "eager": 61.0}},
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
        "2.0x faster: 31 ms a step instead of 61 ms",
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


@pytest.mark.parametrize(
    ("speed", "line"),
    [
        (("eager", 61.2, 61.0), "61 ms a step, as without this node"),
        (("compiled", 31.2, None), "31 ms a step"),
        (("exact", 9.94, 12.0), "1.2x faster: 9.9 ms a step instead of 12 ms"),
        (("compiled", 2899.0, 3875.0), "1.3x faster: 2.90 s a step instead of 3.88 s"),
        (("compiled", 60.0, 61.0), "60 ms a step, about as without this node"),
        (("compiled", 70.0, 61.0), "70 ms a step; without this node 61 ms"),
    ],
)
def test_a_speed_is_told_as_it_was_measured(
    speed: tuple[str, float, float | None], line: str
) -> None:
    form, ms, eager = speed
    times = ({} if eager is None else {"eager": eager}) | {form: ms}
    report = {**REPORT, "speed": {"form": form, "size": "", "ms": times}}
    assert render_text(report).splitlines()[0] == line
    assert "a step" not in render_text({**REPORT, "speed": None})


def test_nothing_is_said_of_builds_when_none_run() -> None:
    report = copy.deepcopy(REPORT)
    report["building"] = {"done": 5, "total": 5, "seconds_left": None, "running": []}
    assert "building" not in render_text(report)
    report["building"] = {"done": 0, "total": 5, "seconds_left": None, "running": []}
    assert "building: 0 of 5\n" in render_text(report)


NOTHING = {"signatures": 0, "captures": 0, "replayed": 0, "vram_bytes": 0, "not_replayed": {}}


def test_a_model_without_regions_is_only_its_note() -> None:
    report = {**REPORT, "regions": {"total": 0, "compiled": 0, "eager": 0}, "captured": NOTHING}
    assert render_text(report) == "2.0x faster: 31 ms a step instead of 61 ms\na note"
    assert render_text({**report, "speed": None}) == "a note"
    captured = {**report, "captured": REPORT["captured"]}
    assert render_text(captured).splitlines()[1].startswith("CUDA graphs: 2 sizes captured")
    assert render_text({**report, "notes": [], "speed": None}) == "nothing to report"
