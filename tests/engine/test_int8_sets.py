"""Products of several layers of one input by int8 weights: quantised once, by one way for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.choices.int8_products import FILE_NAME, Int8Products
from warmgraph_backends.host_api import kitchen
from warmgraph_tools.inprocess import Host

from .int8_card import MACHINE, TIMES, Card, Graph, noting_rows, offered, refusing, rows, several


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch, TIMES)


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    return noting_rows(monkeypatch)


@torch.no_grad()
@pytest.mark.parametrize("form", ["int8", "int8_convrot"])
@pytest.mark.parametrize("act", ["", "gelu_tanh"])
@pytest.mark.parametrize("way", ["apart", "ours"])
def test_several_at_once_equal_each_by_itself_and_are_quantised_once(
    card: Card, host: Host, tmp_path: Path, quantised: list[Any], form: str, act: str, way: str
) -> None:
    graph, x, layers = Graph(), rows(2, 33), several(form)
    graph.is_there = way == "ours"
    products = offered(graph, tmp_path)
    found = products.multiply_several(x, layers, act)
    assert quantised == [(66, 1024)]
    assert (card.apart, graph.calls) == ((0, 3) if graph.is_there else (3, 0))
    assert card.ways == {"host", "apart", *(["ours"] if graph.is_there else [])}
    for mine, layer in zip(found, layers, strict=True):
        assert torch.equal(mine, products.multiply(x, *layer, act)) and mine.shape == (2, 33, 256)
    assert len({each.untyped_storage().data_ptr() for each in found}) == 3
    assert len(quantised) == 4 and card.timed == 2, "the three alike, which are one class"
    assert set(products.ways.chosen.values()) == {way}


@torch.no_grad()
def test_a_graph_of_ours_multiplies_all_of_a_set_or_none(
    card: Card, host: Host, tmp_path: Path, quantised: list[Any]
) -> None:
    x, layers = rows(64), several("int8_convrot")
    unfit = layers[1][0]
    products = offered(Graph(), tmp_path)

    class Graphs:
        """As where one of the weights does not lie in memory as it must."""

        def of(self, like: torch.Tensor, weight: Any) -> Any:
            is_second = weight.values is unfit._qdata
            return None if is_second else products.own.of(like, weight)

    other = Int8Products(tmp_path, MACHINE)
    other.own = Graphs()  # type: ignore[assignment]
    found = other.multiply_several(x, layers)
    assert card.ways == {"host", "apart"} and len(quantised) == 1
    assert len(found) == 3
    wrong = Graph(1.1)
    dropped = offered(wrong, tmp_path / "dropped")
    singly = [torch.nn.functional.linear(x, *layer) for layer in layers]
    assert all(map(torch.equal, dropped.multiply_several(x, layers), singly))
    assert wrong.calls == 1 and "relative L2" in wrong.dropped
    dropped.multiply_several(x, layers)
    assert (wrong.calls, len(quantised)) == (1, 3)


@torch.no_grad()
def test_times_of_a_set_are_its_own(
    card: Card, host: Host, tmp_path: Path, quantised: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kitchen, "version", lambda: "1.2")
    products, x, layers = Int8Products(tmp_path, MACHINE), rows(64), several("int8_convrot")
    card.times = {"host": 1.0, "apart": 2.0}
    products.multiply(x, *layers[0])
    card.times = {"host": 3.0, "apart": 2.5}
    for _ in range(2):
        products.multiply_several(x, layers)
        products.multiply_several(x, layers[1:])
    names = ("256", "256+256+256", "256+256")
    kept = json.loads((tmp_path / FILE_NAME).read_text())[MACHINE]
    assert list(kept) == [f"1.2 rotated bfloat16 1024 {name} 12" for name in names]
    assert card.timed == 3 and len(quantised) == 4
    card.times = {"host": 1.0, "apart": 2.0}
    hosts = Int8Products(tmp_path, "another card").multiply_several(x, layers)
    singly = [torch.nn.functional.linear(x, *layer) for layer in layers]
    assert len(quantised) == 4 and all(map(torch.equal, hosts, singly))


@torch.no_grad()
def test_a_set_of_several_sorts_is_multiplied_one_by_one(
    card: Card, host: Host, tmp_path: Path, quantised: list[Any]
) -> None:
    products, x = Int8Products(tmp_path, MACHINE), rows(64)
    mixed = several(lambda name: "int8_convrot" if "txt" in name else "int8")
    plain = [(torch.randn(256, 1024).bfloat16(), None), *mixed[1:]]
    for layers, count in ((mixed, 3), (plain, 2)):
        quantised.clear()
        found = products.multiply_several(x, layers)
        assert len(quantised) == count
        assert all(map(torch.equal, found, [products.multiply(x, *layer) for layer in layers]))


@torch.no_grad()
def test_a_set_that_the_library_refuses_is_the_hosts_and_one_is_not_timed_in_a_capture(
    card: Card, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    products, x, layers = Int8Products(tmp_path, MACHINE), rows(64), several("int8_convrot")
    singly = [torch.nn.functional.linear(x, *layer) for layer in layers]
    products.multiply(x, *layers[0])  # compiles the kernel
    timed, card.is_capturing = card.timed, True
    assert all(map(torch.equal, products.multiply_several(x, layers), singly))
    assert card.timed == timed
    card.is_capturing = False
    monkeypatch.setattr(kitchen, "multiply_int8_rows", refusing)
    for _ in range(2):
        assert all(map(torch.equal, products.multiply_several(x, layers), singly))
    assert card.timed == timed + 1
