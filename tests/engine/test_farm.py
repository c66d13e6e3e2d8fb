"""An engine whose graphs are built by other processes over TCP, as other machines would."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.building.farm import VARIABLE
from warmgraph_backends.graphs.compiled_graph import State
from warmgraph_tools.farm import Farm
from warmgraph_tools.inprocess import Host

from .lab import Lab

QUICK = ("Transformer entry 64", "Upsample 64", "Downsample 64", "Output head 64")


@pytest.fixture
def farm(tmp_path: Path, host_tree: Path) -> Iterator[Farm]:
    """A scheduler with two workers."""
    farm = Farm(tmp_path / "farm")
    for name in ("a", "b"):
        farm.add(name, "--comfyui", host_tree)
    yield farm
    farm.stop()


@pytest.fixture
def asking(farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """An engine with an empty store, as `prebuild` starts one."""
    monkeypatch.setenv(VARIABLE, farm.address)
    lab = Lab(tmp_path / "asking")
    yield lab
    lab.engine.close()


def ask(lab: Lab, session: Any, *labels: str) -> list[Any]:
    graphs = [k.graph for k in session.scope.kinds if k.label in labels and k.graph is not None]
    assert len(graphs) == len(labels)
    lab.engine._graphs.settle()
    lab.engine._graphs.request(graphs, [], build=True)
    return graphs


def session_of(lab: Lab, host: Host) -> Any:
    model, *_ = host.load("narrowxl")
    return lab.compiled(model, when_missing="never").attachments["warmgraph"]


def test_two_machines_fill_an_empty_store_and_the_one_that_asks_signs(
    farm: Farm,
    asking: Lab,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    graphs = ask(asking, session_of(asking, host), *QUICK[:2])
    asking.wait_until(lambda: not any(graph.is_pending for graph in graphs))
    assert [graph.reason for graph in graphs] == [None, None]
    assert [graph.source for graph in graphs] == ["built", "built"]
    assert (farm.begun("a"), farm.begun("b")) == (1, 1)
    assert "is built here" not in caplog.text
    monkeypatch.delenv(VARIABLE)
    again = Lab(asking.root)  # as another server with the same key
    found = ask(again, session_of(again, host), *QUICK[:2])
    again.wait_until(lambda: not any(graph.is_pending for graph in found))
    assert [graph.source for graph in found] == ["loaded", "loaded"]
    again.engine.close()


@pytest.mark.slow
def test_what_a_worker_and_then_the_scheduler_take_along_is_built_all_the_same(
    farm: Farm, asking: Lab, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    session = session_of(asking, host)
    (graph,) = ask(asking, session, QUICK[0])
    asking.wait_until(lambda: any(farm.begun(each) for each in farm.workers))
    (name,) = (each for each in farm.workers if farm.begun(each))
    farm.end(name, getattr(signal, "SIGKILL", signal.SIGTERM))
    asking.wait_until(lambda: not graph.is_pending)
    assert (graph.state, graph.reason) == (State.READY, None)
    (other,) = farm.workers
    assert farm.begun(other) == 1
    assert "is built here" not in caplog.text

    (graph,) = ask(asking, session, QUICK[1])
    asking.wait_until(lambda: farm.begun(other) == 2)
    farm.kill_scheduler()
    asking.wait_until(lambda: not graph.is_pending)
    assert (graph.state, graph.reason) == (State.READY, None)
    assert "is built here: its scheduler is gone" in caplog.text
    assert farm.workers.pop(other).wait(60) == 1
    assert f"{farm.address} is gone" in farm.log(other)
    asking.wait_until(lambda: farm.left() == [])
