"""An engine over the real host in this process, with graphs built once for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.engine import Engine, Hooks, Paths, WorkflowRef
from warmgraph_backends.settings import Settings
from warmgraph_tools.inprocess import Host


class Lab:
    """One engine with folders of its own, and a workflow that a test may set."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workflow: WorkflowRef | None = None
        self.cancelled: Callable[[], None] = lambda: None
        self.workflows = root / "user" / "default" / "workflows"
        self.workflows.mkdir(parents=True, exist_ok=True)
        private = root / "user" / "__warmgraph"
        private.mkdir(exist_ok=True)
        self.settings = Settings(private)
        self.engine = Engine(
            paths=Paths(
                store=root / "models" / "compiled_graphs",
                private=private,
                workflows=lambda user: self.workflows,
            ),
            settings=self.settings,
            hooks=Hooks(
                current_workflow=lambda: self.workflow,
                on_change=lambda: None,
                check_cancelled=lambda: self.cancelled(),
            ),
        )

    def compiled(self, model: Any, **options: Any) -> Any:
        return self.engine.compile_model(model, **{"when_missing": "wait", **options})

    def counts(self, model: Any) -> tuple[int, int, int]:
        """(builds, loads, eager regions) of a compiled model."""
        report = self.engine.report(model)
        return report["builds"], report["loads"], report["regions"]["eager"]

    def builds(self) -> int:
        return self.engine._graphs.builds


@pytest.fixture(scope="session")
def lab(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The shared engine: what one test builds, the next one finds."""
    root = Path(os.environ.get("WARMGRAPH_TEST_LAB") or tmp_path_factory.mktemp("lab"))
    lab = Lab(root)
    yield lab
    lab.engine.close()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||."""
    return float((a - b).norm() / b.norm())
