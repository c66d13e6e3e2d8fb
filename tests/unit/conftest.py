"""The pack itself, imported as the host imports it: as a package, in the real host."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from warmgraph_tools import by_path
from warmgraph_tools.inprocess import Host

from .like_windows import LikeWindows

ROOT = Path(__file__).resolve().parents[2]
NAME = "warmgraph_pack"


@pytest.fixture(scope="session")
def pack(host: Host) -> ModuleType:
    """The pack's root module; its modules are `sys.modules["warmgraph_pack.nodes.server"]`..."""
    return by_path.load(NAME, ROOT)


@pytest.fixture
def like_windows(monkeypatch: pytest.MonkeyPatch) -> LikeWindows:
    """Windows' rules for the files and processes of a test."""
    if not sys.platform.startswith("linux"):
        pytest.skip("imitates Windows on Linux")
    return LikeWindows(monkeypatch)
