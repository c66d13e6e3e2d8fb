"""From which pool of a card a graph has its memory."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from warmgraph_backends.cuda_graphs import driver as driver_room
from warmgraph_backends.several_cards.own_pools import OwnPoolGraph, OwnPools

HOW = {"pool": (0, 7), "capture_error_mode": "thread_local"}
CARDS = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Driver:
    """Has the pools of two cards; the first ones are PyTorch's."""

    def __init__(self, *, gives: bool = True, sets: bool = True) -> None:
        self.gives, self.sets = gives, sets
        self.pools = {0: 100, 1: 101}
        self.made: list[int] = []
        self.trimmed: list[int] = []

    def cuMemPoolCreate(self, pool: Any, wanted: Any) -> int:  # noqa: N802
        if not self.gives:
            return 801  # CUDA_ERROR_NOT_SUPPORTED
        assert wanted._obj.allocation_type == wanted._obj.location_type == 1
        self.made.append(wanted._obj.location_id)
        pool._obj.value = 200 + wanted._obj.location_id
        return 0

    def cuDeviceGetMemPool(self, pool: Any, card: int) -> int:  # noqa: N802
        pool._obj.value = self.pools[card]
        return 0

    def cuDeviceSetMemPool(self, card: int, pool: ctypes.c_void_p) -> int:  # noqa: N802
        assert pool.value is not None
        if not self.sets:
            return 1  # CUDA_ERROR_INVALID_VALUE
        self.pools[card] = pool.value
        return 0

    def cuDeviceGraphMemTrim(self, card: int) -> int:  # noqa: N802
        self.trimmed.append(card)
        return 0


class Recorded:
    """A graph, and from where it had its memory."""

    def __init__(self, driver: Driver, *, breaks: str = "") -> None:
        self.driver, self.breaks = driver, breaks
        self.pools: list[dict[int, int]] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert pool == (0, 7) and capture_error_mode == "thread_local"
        self._see("begin")

    def capture_end(self) -> None:
        self._see("end")

    def _see(self, now: str) -> None:
        self.pools.append(dict(self.driver.pools))
        if now == self.breaks:
            raise RuntimeError(now)


def _capture(driver: Driver, card: torch.device, pools: OwnPools, **options: Any) -> Recorded:
    recorded = Recorded(driver, **options)
    graph = OwnPoolGraph(card, recorded, pools)
    graph.capture_begin(**HOW)
    graph.capture_end()
    return recorded


def _pools(driver: Driver | None) -> OwnPools:
    return OwnPools(lambda: driver)


@pytest.mark.parametrize("card", CARDS)
def test_a_card_has_a_pool_of_its_own_while_a_graph_is_captured_on_it(card: torch.device) -> None:
    driver = Driver()
    pools = _pools(driver)
    for _ in range(2):
        recorded = _capture(driver, card, pools)
        meanwhile = {0: 100, 1: 101} | {card.index: 200 + card.index}
        assert recorded.pools == [meanwhile, meanwhile]
        assert driver.pools == {0: 100, 1: 101}
    assert driver.made == [card.index], "one for all of its graphs"
    assert pools.are_apart(card)


@pytest.mark.parametrize("breaks", ["begin", "end"])
def test_it_has_the_one_before_again_where_a_capture_breaks_off(breaks: str) -> None:
    driver = Driver()
    with pytest.raises(RuntimeError, match=breaks):
        _capture(driver, CARDS[1], _pools(driver), breaks=breaks)
    assert driver.pools == {0: 100, 1: 101}


def test_captures_on_two_cards_go_on_at_once() -> None:
    driver = Driver()
    pools = _pools(driver)
    graphs = [OwnPoolGraph(card, Recorded(driver), pools) for card in CARDS]
    for graph in graphs:
        graph.capture_begin(**HOW)
    assert driver.pools == {0: 200, 1: 201}
    graphs[0].capture_end()
    assert driver.pools == {0: 100, 1: 201}
    graphs[1].capture_end()
    assert driver.pools == {0: 100, 1: 101}


@pytest.mark.parametrize(
    ("allocator", "count", "is_apart"),
    [("cudaMallocAsync", 1, False), ("native", 2, False), ("cudaMallocAsync", 2, True)],
)
def test_pytorchs_own_graph_serves_where_no_other_card_can_map_it(
    monkeypatch: pytest.MonkeyPatch, allocator: str, count: int, is_apart: bool
) -> None:
    made = Recorded(Driver())
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    graph = driver_room.make_graph(CARDS[0])
    assert isinstance(graph, OwnPoolGraph) if is_apart else graph is made


def test_two_captures_of_one_card_leave_it_its_first_pool() -> None:
    driver = Driver()
    pools = _pools(driver)
    one, other = (OwnPoolGraph(CARDS[0], Recorded(driver), pools) for _ in range(2))
    one.capture_begin(**HOW)
    other.capture_begin(**HOW)
    other.capture_end()
    assert driver.pools[0] == 200
    one.capture_end()
    assert driver.pools[0] == 100


def _trimmed(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | None, pools: OwnPools, *, cards: int = 2
) -> bool:
    """Whether memory of a card is given back."""
    monkeypatch.setattr(driver_room, "library", lambda: driver or Driver())
    monkeypatch.setattr(driver_room, "OWN_POOLS", pools)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    driver_room.trim(CARDS[0])
    return driver is not None and driver.trimmed == [0]


def test_what_lies_apart_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    pools = _pools(driver)
    _capture(driver, CARDS[0], pools)
    assert _trimmed(monkeypatch, driver, pools)
    driver = Driver()
    assert _trimmed(monkeypatch, driver, _pools(driver), cards=1) and not driver.made


@pytest.mark.parametrize("driver", [None, Driver(gives=False), Driver(sets=False)])
def test_where_the_driver_gives_no_pool_its_memory_is_not_given_back(
    driver: Driver | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = _pools(driver)
    for _ in range(2):
        recorded = _capture(driver or Driver(), CARDS[0], pools)
        assert recorded.pools == [{0: 100, 1: 101}] * 2
        assert not pools.are_apart(CARDS[0]) and not _trimmed(monkeypatch, driver, pools)
    assert caplog.text.count("gives no memory pool for card 0") == 1
