"""The memory that captured calls may hold: who goes when it is full, and who gets it back."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from warmgraph_backends.cuda_graphs import memory as memory_room
from warmgraph_backends.cuda_graphs.memory import CapturedMemory, CardMemory
from warmgraph_tools.inprocess import Host


class _Held:
    """Holds memory as a captured graph does."""

    device = torch.device("cpu")

    def __init__(self, size: int, *, own: int = 0) -> None:
        self.memory: torch.Tensor | None = torch.empty(size, dtype=torch.uint8)
        self.own_bytes = own

    def free(self) -> list[Any]:
        self.memory = None
        return []


class _Owner:
    def __init__(self) -> None:
        self.gone: list[Any] = []
        self.crowded: list[bool] = []

    def forget(self, graph: Any, *, crowded: bool) -> None:
        self.gone.append(graph)
        self.crowded.append(crowded)


CPU = torch.device("cpu")


def test_over_the_budget_those_go_that_were_not_used_for_longest_one_by_one(host: Host) -> None:
    released: list[torch.device] = []
    memory, owner = CardMemory(CPU, lambda _: 100, released.append), _Owner()
    graphs = [_Held(1, own=20) for _ in range(4)]
    for graph in graphs:
        assert memory.add(graph, owner, 10 if graph is graphs[0] else 0) is None
    assert owner.gone == [] and memory.used_bytes == 90
    memory.note_use(graphs[0])
    assert memory.add(fifth := _Held(1, own=40), owner, 0) is None
    assert owner.gone == graphs[1:3] and owner.crowded == [True, True]
    assert graphs[0] not in owner.gone and fifth not in owner.gone and memory.used_bytes == 90
    assert released == [], "the pool is the others'"
    memory.drop_all()
    assert owner.crowded == [True, True, False, False, False] and released == [CPU]


def test_where_the_pool_is_over_the_budget_nothing_less_than_all_gives_it_back(host: Host) -> None:
    memory, owner = CardMemory(CPU, lambda _: 100, lambda _: None), _Owner()
    graphs = [_Held(1, own=10) for _ in range(3)]
    assert [memory.add(graph, owner, 40) for graph in graphs] == [None, None, None]
    assert owner.gone == graphs and memory.used_bytes == 0
    assert "(110 MiB) is over" in (
        CardMemory(CPU, lambda _: 100 << 20, lambda _: None).add(
            _Held(1, own=10 << 20), owner, 100 << 20
        )
        or ""
    )


def test_over_the_budget_all_graphs_go_and_what_never_fits_is_named(host: Host) -> None:
    released: list[torch.device] = []
    memory, owner = CardMemory(CPU, lambda _: 100, released.append), _Owner()
    graphs = [_Held(40) for _ in range(3)]
    assert [memory.add(graph, owner, 40) for graph in graphs] == [None, None, None]
    assert owner.gone == graphs and all(graph.memory is None for graph in graphs)
    assert memory.used_bytes == 0 and released == [CPU]
    huge = _Held(200)
    assert "over the budget" in (memory.add(huge, owner, 200) or "")
    assert memory.used_bytes == 0 and huge.memory is None


def test_memory_that_graphs_share_is_counted_until_the_last_one_goes(host: Host) -> None:
    memory, owner = CardMemory(CPU, lambda _: 100, lambda _: None), _Owner()
    graphs = [_Held(40), _Held(0)]
    for graph in graphs:
        memory.add(graph, owner, 40 if graph is graphs[0] else 0)
    memory.drop(graphs[0])
    assert memory.used_bytes == 40
    memory.drop(graphs[1])
    assert memory.used_bytes == 0


def test_graphs_whose_model_is_gone_are_let_go(host: Host) -> None:
    memory, owner, graph = CardMemory(CPU, lambda _: 100, lambda _: None), _Owner(), _Held(40)
    memory.add(graph, owner, 40)
    memory.sweep()
    assert graph.memory is not None
    del owner
    gc.collect()
    memory.sweep()
    assert graph.memory is None and memory.used_bytes == 0


def test_the_driver_gets_back_what_the_last_graph_held(host: Host) -> None:
    """Its reserve would be counted as nothing, and given to the next capture for nothing."""
    released: list[Any] = []
    memory = CardMemory(CPU, lambda _: 1000, released.append)
    owner = _Owner()
    first, second = _Held(1), _Held(1)
    for graph in (first, second):
        memory.add(graph, owner, 100)
    memory.drop(first)
    assert released == []
    memory.drop(second)
    assert released == [CPU]
    memory.add(_Held(1), owner, 100)
    del owner
    gc.collect()
    memory.sweep()
    assert released == [CPU, CPU]


def test_the_host_sees_the_memory_and_gets_it_back(host: Host) -> None:
    import comfy.model_management as management

    memory, owner = CardMemory(CPU, lambda _: 1000, lambda _: None), _Owner()
    for round_ in range(2):  # it stands in the list again after it was unloaded
        graph = _Held(500)
        memory.add(graph, owner, 500)
        alive = [m for m in management.current_loaded_models if m.model is not None]
        listed = [m for m in alive if m.model_memory() == 500]
        assert len(listed) == 1 and not listed[0].currently_used, round_
        management.free_memory(1e30, CPU)
        assert graph.memory is None and memory.used_bytes == 0
        assert listed[0] not in management.current_loaded_models


class _Graph:
    """A CUDA graph that PyTorch can be told to let go of."""

    def __init__(self) -> None:
        self.is_reset = False

    def reset(self) -> None:
        self.is_reset = True


class _Captured(_Held):
    """What was captured, in one graph."""

    def __init__(self) -> None:
        super().__init__(1)
        self.graph = _Graph()

    def free(self) -> list[Any]:
        return [*super().free(), self.graph]


@pytest.fixture
def keeping(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a PyTorch that frees what a stream's graphs share with any of them."""
    monkeypatch.setattr(memory_room, "has_to_keep", lambda: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))


@pytest.mark.usefixtures("keeping")
def test_while_others_of_its_card_are_replayed_a_graph_is_kept_from_pytorch() -> None:
    memory, owner = CapturedMemory(lambda _: 2**40, lambda _: None), _Owner()
    meta = torch.device("meta")
    first, second, elsewhere = _Captured(), _Captured(), _Captured()
    for held, device in ((first, CPU), (second, CPU), (elsewhere, meta)):
        assert memory.on(device).add(held, owner, 1) is None
    memory.on(CPU).drop(first)
    memory.on(meta).drop(elsewhere)
    assert first.memory is None and not first.graph.is_reset and elsewhere.graph.is_reset
    memory.on(CPU).drop(second)
    assert first.graph.is_reset and second.graph.is_reset, "none of its card is replayed"


@pytest.mark.usefixtures("keeping")
def test_one_that_failed_is_kept_only_while_others_are_replayed() -> None:
    memory = CardMemory(CPU, lambda _: 2**40, lambda _: None)
    memory.drop(failed := _Captured())
    assert failed.graph.is_reset, "none of its card is replayed"
    assert memory.add(stays := _Captured(), owner := _Owner(), 1) is None
    memory.drop(failed := _Captured())
    assert not failed.graph.is_reset and stays.memory is not None
    memory.drop_all()
    assert failed.graph.is_reset and owner.gone == [stays], "the host asked for room"


@pytest.mark.usefixtures("keeping")
def test_too_many_that_are_kept_end_all_of_their_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_room, "MOST_RETIRED", 3)
    memory, owner = CardMemory(CPU, lambda _: 2**40, lambda _: None), _Owner()
    stays = _Captured()
    memory.add(stays, owner, 1)
    for number in range(3):
        assert owner.gone == [] and not stays.graph.is_reset, number
        memory.pool()
        memory.drop(_Captured())
    memory.pool()
    assert owner.gone == [stays] and stays.graph.is_reset


@pytest.mark.parametrize(
    ("version", "keeps"),
    [("2.10.0", False), ("2.11.0+cu130", False), ("2.12.0a0+git1", True), ("2.15.0", True)],
)
def test_which_pytorch_frees_what_graphs_share(
    host: Host, monkeypatch: pytest.MonkeyPatch, version: str, keeps: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    memory = CardMemory(CPU, lambda _: 2**40, lambda _: None)
    memory.add(_Captured(), owner := _Owner(), 1)
    memory.drop(dropped := _Captured())
    assert dropped.graph.is_reset is not keeps and owner.gone == []
