"""The pack itself, imported as the host imports it: as a package, in the real host."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from warmgraph_tools import by_path
from warmgraph_tools.inprocess import Host

ROOT = Path(__file__).resolve().parents[2]
NAME = "warmgraph_pack"


@pytest.fixture(scope="session")
def pack(host: Host) -> ModuleType:
    """The pack's root module; its modules are `sys.modules["warmgraph_pack.nodes.server"]`..."""
    return by_path.load(NAME, ROOT)
