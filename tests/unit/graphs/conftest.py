"""A place to ask for graphs, and a watch over threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .places import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.graphs.close()


@pytest.fixture(autouse=True)
def nothing_escapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    escaped: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", escaped.append)
    yield
    assert escaped == []
