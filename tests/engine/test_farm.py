"""An engine whose graphs are built by other processes over TCP, as other machines would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.building.chosen import VARIABLE
from warmgraph_backends.graphs.graph import State
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


def test_a_farm_fills_an_empty_store_and_what_it_lost_is_built_here(
    farm: Farm, asking: Lab, host: Host, tmp_path: Path
) -> None:
    model, *_ = host.load("narrowxl")
    session = asking.compiled(model, when_missing="never").attachments["warmgraph"]
    graphs = ask(asking, session, *QUICK[:2])
    asking.wait_until(lambda: not any(graph.is_pending for graph in graphs))
    assert [graph.reason for graph in graphs] == [None, None]
    assert [graph.source for graph in graphs] == ["built", "built"]
    assert (farm.begun("a"), farm.begun("b")) == (1, 1)
    builder = asking.engine._builder
    assert not builder._local._seconds  # none by workers of this process
    again = Lab(asking.root)
    assert len(list(again.store.glob("*.safetensors"))) == 2
    again.engine.close()

    farm.kill_scheduler()
    (graph,) = ask(asking, session, QUICK[2])
    asking.wait_until(lambda: not graph.is_pending)
    assert (graph.state, graph.reason) == (State.READY, None)
    assert builder._local._seconds
    for name in ("a", "b"):
        assert farm.workers.pop(name).wait(30) == 1
        assert f"{farm.address} is gone" in farm.log(name)
    assert farm.left() == []
