"""The pack itself, imported as the host imports it: as a package, in the real host."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from warmgraph_tools.inprocess import Host

ROOT = Path(__file__).resolve().parents[2]
NAME = "warmgraph_pack"


@pytest.fixture(scope="session")
def pack(host: Host) -> ModuleType:
    """The pack's root module; its modules are `sys.modules["warmgraph_pack.nodes.server"]`..."""
    spec = importlib.util.spec_from_file_location(
        NAME, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module
