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
    """The file of a kind of the first prompt's; another model's may be called so as well."""
    paths = [lab.store / f"{key}.safetensors" for key in lab.first_keys]
    (found,) = (p for p in paths if lab.engine._store.read_manifest(p).kind == kind)
    return found


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
    again.workflow, again.first_keys = lab.workflow, lab.first_keys
    return again
