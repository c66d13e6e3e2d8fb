"""A snapshot in the words of Prometheus; its own parser reads them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_PLAIN = {"compiled": 0, "eager": 2}
SNAPSHOT: dict[str, Any] = {
    "builds": 3,
    "loads": 20,
    "runs_made": 5,
    "building": {"done": 1, "total": 4, "workers": 2},
    "store": {"files": 23, "bytes": 1000},
    "captured": {"vram_bytes": 7},
    "warnings": [],
    "models": [
        {
            "id": "model-1",
            "model": 'My "own"\n',
            "speed": {"ms": {"eager": 61.0, "compiled": 31.0}},
            "factor": 1.968,
            "regions": {"compiled": 113, "eager": 1},
        },
        {"id": "vae-2", "model": "VAE", "speed": None, "factor": None, "regions": _PLAIN},
    ],
}


@pytest.fixture
def metrics(pack: Any) -> ModuleType:
    return sys.modules[f"{pack.__name__}.nodes.metrics"]


def test_every_figure_has_a_name_and_its_unit(metrics: ModuleType) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="an optional library")
    body, kind = metrics.render(SNAPSHOT)
    assert kind.startswith("text/plain")
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    assert found[("warmgraph_builds_total",)] == 3 and found[("warmgraph_runs_total",)] == 5
    assert found[("warmgraph_builds_left",)] == 3 and found[("warmgraph_workers",)] == 2
    named = ("id", "model-1"), ("model", 'My "own"\n')
    assert found[("warmgraph_step_seconds", ("form", "compiled"), *named)] == 0.031
    assert found[("warmgraph_speed_ratio", *named)] == 1.968
    assert found[("warmgraph_parts", *named, ("state", "eager"))] == 1
    assert not any("vae-2" in str(key) for key in found if "speed" in key[0] or "step" in key[0])


def test_without_the_library_nothing_is_offered(
    metrics: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "prometheus_client", raising=False)
    assert not metrics.is_installed()
