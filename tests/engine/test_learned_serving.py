"""A model that nobody described is learned from one step of a run, and served like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.watched import sample

from .lab import TOLERANCE, Lab, Probe

#: Height, width, batch, tokens of the text, frames; the first one is watched.
CALLS = ((8, 8, 1, 13, 1), (12, 8, 1, 1, 1), (16, 10, 2, 40, 1), (4, 6, 3, 300, 1))


class Served:
    """A small transformer through Compile Model beside eager, call by call."""

    def __init__(self, host: Host, lab: Lab, kind: str, **options: Any) -> None:
        self.host, self.lab, self.kind = host, lab, kind
        self.probe = Probe()
        self.plain = self.probe.attach(transformers.load(kind))
        self.model = lab.compiled(self.plain, **{"when_missing": "background", **options})

    @property
    def report(self) -> Any:
        return self.lab.engine.report(self.model)

    @property
    def session(self) -> Any:
        return next(each for each in self.lab.engine._sessions.values())

    def run(self, sizes: tuple[int, ...] = CALLS[0]) -> tuple[int, float]:
        """One step; how many calls of blocks graphs served, and how far it is from eager."""
        self.probe.calls.clear()
        before = self.report["calls"]["compiled"]
        sample(self.host, self.kind, self.model, sizes)
        (call,) = self.probe.calls
        return self.report["calls"]["compiled"] - before, call.error

    def settle(self) -> None:
        """Wait for what was asked of the workers."""
        builder = self.lab.engine._builder
        self.lab.wait_until(lambda: (p := builder.progress()).done >= p.total)
        self.lab.settle()
        self.lab.wait_until(lambda: self.lab.is_settled(self.model))


@pytest.fixture
def new_lab(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    labs: list[Lab] = []

    def make(like: Lab | None = None, *, learns: bool = True) -> Lab:
        root = tmp_path / str(len(labs))
        root.mkdir()
        labs.append(Lab(root) if like is None else like.copy_to(root))
        labs[-1].settings.update({"learn_models": learns})
        return labs[-1]

    yield make
    for lab in labs:
        lab.engine.close()


@pytest.fixture(autouse=True)
def _unloaded(host: Host) -> Iterator[None]:
    with torch.inference_mode():
        yield
    host.unload()


def test_a_model_is_learned_in_its_first_step_and_then_compiled(
    host: Host, new_lab: Callable[..., Lab]
) -> None:
    """One run is watched, one builds, all others are served, whatever their sizes."""
    lab = new_lab()
    served = Served(host, lab, "ernie")
    assert served.run() == (0, 0.0)
    assert lab.builds() == 0 and lab.jobs() == 1
    served.settle()
    assert served.run(CALLS[1]) == (0, 0.0)
    served.settle()
    assert lab.builds() == 1
    for sizes in CALLS:
        calls, error = served.run(sizes)
        assert calls == 2 and error <= TOLERANCE
    report = served.report
    assert report["regions"] == {"total": 2, "compiled": 2, "eager": 0}
    assert lab.builds() == 1 and lab.jobs() == 2
