"""One small transformer of each family, compiled once for a module's tests."""

from __future__ import annotations

from typing import Any

import pytest

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from ..lab import Lab
from ..transformer_runs import Run
from .kinds import FAMILIES


@pytest.fixture(scope="module", params=FAMILIES)
def run(host: Host, shared: Lab, request: Any) -> Run:
    if not transformers.is_there(request.param):
        pytest.skip(f"this ComfyUI has no {request.param}")
    run = Run(host, shared, request.param)
    run.sample()
    return run
