"""Builders with real worker processes, closed when their test is over."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.building.builder import Builder

SCRIPT = Path(__file__).resolve().parents[1] / "builder_worker.py"


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that workers' caches are made in."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def make(tmp_path: Path, temp: Path) -> Iterator[Callable[..., Builder]]:
    builders: list[Builder] = []

    def make_builder(
        workers: int = 1, limit_s: float = 60.0, hello: Any = None, **more: Any
    ) -> Builder:
        builder = Builder(
            hello={"roll": str(tmp_path / "roll"), **(hello or {})},
            spool=tmp_path / "spool",
            workers=lambda: workers,
            time_limit_s=lambda: limit_s,
            **{"script": SCRIPT, **more},
        )
        builders.append(builder)
        return builder

    yield make_builder
    for builder in builders:
        builder.close()
