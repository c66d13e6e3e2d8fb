"""What tests of mishaps look at: graphs' files, what was logged, and whether the image is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.storing.graph_file import read_graph

from .lab import TOLERANCE, Lab
from .probed import Probed

QUICK = "Transformer entry 64"  # its build takes least
KINDS = 8
MakeLab = Callable[..., Lab]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of ours so far."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("warmgraph_backends")]


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    """How many lines of the log say so."""
    return sum(words in line for line in warnings(caplog))


def file_of(lab: Lab, kind: str = QUICK) -> Path:
    """A kind's file in the shared store."""
    for path in sorted(lab.store.glob("*.safetensors"), key=lambda p: -p.stat().st_mtime_ns):
        if lab.engine._store.read_manifest(path).kind == kind:
            return path
    raise AssertionError(f"the store has no {kind}")


def state_of(model: Probed, kind: str = QUICK) -> dict[str, Any]:
    return next(k for k in model.report()["kinds"] if k["kind"] == kind)


def right(model: Probed, **options: Any) -> torch.Tensor:
    """Sample, and assert that every UNet call is eager's within tolerance."""
    image = model.sample(**options)
    assert model.probe.calls
    assert max(call.error for call in model.probe.calls) <= TOLERANCE
    return image


def parts_of(lab: Lab, path: Path) -> tuple[dict[str, Any], bytes]:
    """A file's manifest and payload."""
    graph = read_graph(path, lab.signer)
    return dict(graph.manifest.data), graph.payload


def restarted(lab: Lab) -> Lab:
    """A new server process over the same folders."""
    lab.engine.close()
    again = Lab(lab.root)
    again.workflow = lab.workflow
    return again
