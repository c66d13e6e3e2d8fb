"""Jobs for a builder whose workers do other work (`builder_worker.py`), and how they end."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

from warmgraph_backends.building.builder import Builder
from warmgraph_backends.building.contract import BuildResult, Job
from warmgraph_backends.errors import BuildError

from ..workers import wait_until

PATIENCE_S = 180.0
_numbers = count()


def job(do: str, *, key: str = "", label: str = "", cost: int = 1, **task: Any) -> Job:
    key = key or f"key{next(_numbers)}"
    return Job(key=key, label=label or f"{do} {key}", cost=cost, task={"do": do, **task})


def result_of(future: Future[BuildResult]) -> BuildResult:
    return future.result(PATIENCE_S)


def error_of(future: Future[BuildResult]) -> BuildError:
    error = future.exception(PATIENCE_S)
    assert isinstance(error, BuildError)
    return error


def warm_up(builder: Builder, workers: int, tmp_path: Path) -> None:
    """Have so many workers ready and idle."""
    end = tmp_path / "warm"
    futures = [builder.submit(job("wait", until=str(end))) for _ in range(workers)]
    assert wait_until(lambda: all(future.running() for future in futures))
    end.touch()
    for future in futures:
        result_of(future)


def starts(tmp_path: Path) -> int:
    roll = tmp_path / "roll"
    return len(roll.read_text().splitlines()) if roll.exists() else 0
