"""A control network over a narrow SDXL, compiled once for a module's tests."""

from __future__ import annotations

import pytest

from warmgraph_tools.inprocess import Host

from ..controlled import Controlled
from ..lab import Lab


@pytest.fixture(scope="module")
def xl(lab: Lab, host: Host) -> Controlled:
    return Controlled(lab, host)
