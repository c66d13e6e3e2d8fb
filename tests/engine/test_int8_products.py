"""Products by int8 weights, in the host's own layers: by what the library chose, or of rows that a
kernel of ours quantised: as near to the truth as the library's own, and only where that is quicker.
What a GPU would take is given (`int8_card`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.choices import auxiliary
from warmgraph_backends.choices.int8_products import FILE_NAME, Int8Products
from warmgraph_backends.host_api import activations, kitchen
from warmgraph_backends.kernels import int8_rows
from warmgraph_tools.exact_rows import exact, hadamard
from warmgraph_tools.inprocess import Host

from .int8_card import MACHINE, TIMES, Card, Graph, error, layer_of, offered, rows


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch, TIMES)


@pytest.fixture(scope="module")
def layer(host: Host) -> Any:
    """One whose weights are rotated."""
    return layer_of("int8_convrot")


@torch.no_grad()
@pytest.mark.parametrize("form", ["int8", "int8_convrot"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_as_near_to_the_truth_as_the_librarys_own(
    card: Card, host: Host, tmp_path: Path, form: str, dtype: torch.dtype
) -> None:
    layer, x = layer_of(form), rows(2, 33, dtype=dtype)
    weight = layer.weight.dequantize().double()
    truth = x.double() @ weight.T + layer.bias.double()
    found, hosts = Int8Products(tmp_path, MACHINE).call(layer, x), layer(x)
    assert card.apart == 1 and found.shape == (2, 33, 256) and found.dtype is dtype
    assert error(found, truth) <= 1.02 * error(hosts, truth)
    assert "_forward" not in layer.__dict__


@torch.no_grad()
@pytest.mark.parametrize("form", ["int8", "int8_convrot"])
@pytest.mark.parametrize("act", sorted(int8_rows.ACTIVATIONS.keys() - {""}))
def test_an_activation_is_computed_along_the_way(
    card: Card, host: Host, tmp_path: Path, form: str, act: str
) -> None:
    layer = layer_of(form)
    x = torch.cat([rows(33)] * int8_rows.ACTIVATIONS[act].parts, -1)
    active = exact(x, act, rotated=False)
    assert error(activations.activated(x, act), active) < 1e-2  # the host means the same by it
    truth = active @ layer.weight.dequantize().double().T + layer.bias.double()
    found = Int8Products(tmp_path, MACHINE).multiply(x, layer.weight, layer.bias, act)
    weight = kitchen.int8_weight(layer.weight)
    assert weight is not None
    given = x, weight, layer.bias, act
    hosts = kitchen.int8_product(*given)(*given)
    assert card.apart == 1 and error(found, truth) <= 1.02 * error(hosts, truth)


def test_all_of_the_hosts_activations_are_known(host: Host) -> None:
    import comfy.ops

    assert int8_rows.ACTIVATIONS.keys() - {""} == comfy.ops.INPUT_ACT_EAGER.keys()


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("int8", torch.bfloat16),
        ("int8", torch.float32),  # of rows that the library quantised
        ("int8_convrot", torch.bfloat16),
        ("int8_convrot", torch.float16),
    ],
    ids=str,
)
def test_a_graph_of_ours_is_as_near_to_the_truth(
    card: Card, host: Host, tmp_path: Path, form: str, dtype: torch.dtype
) -> None:
    """Also of weights that were not rotated, which have one scale, with a bias and without."""
    layer, x, graph = layer_of(form), rows(2, 33, dtype=dtype), Graph()
    products = offered(graph, tmp_path, dtype)
    truth = x.double() @ layer.weight.dequantize().double().T
    for bias in (layer.bias.to(dtype), None):
        hosts = torch.nn.functional.linear(x, layer.weight, bias)
        found = products.multiply(x, layer.weight, bias)
        exact = truth if bias is None else truth + bias.double()
        assert found.shape == (2, 33, 256) and found.dtype is dtype
        assert error(found, exact) <= 1.02 * error(hosts, exact)
    assert graph.calls == 2 and graph.dropped is None and card.apart == 0
    assert card.ways == {"host", "ours", *(["apart"] if dtype is not torch.float32 else [])}


@torch.no_grad()
def test_a_graph_that_comes_later_is_timed_with_the_others_then(
    card: Card, layer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kitchen, "version", lambda: "1.2")
    graph, x = Graph(), rows(64)
    graph.is_there = False
    products = offered(graph, tmp_path)
    products.call(layer, x)
    assert (card.timed, card.apart, graph.calls) == (1, 1, 0)
    graph.is_there = True
    products.call(layer, x)
    assert (card.timed, card.apart, graph.calls) == (2, 1, 1)
    kept = json.loads((tmp_path / FILE_NAME).read_text())[MACHINE]
    named = "1.2 rotated bfloat16 1024 256 12"
    assert kept == {
        named: {"host": 1.0, "apart": 0.5},
        f"{named} ours 01234567": {"host": 1.0, "apart": 0.5, "ours": 0.25},
    }
    again = offered(Graph(), tmp_path)
    again.call(layer, x)
    assert (card.timed, card.apart) == (2, 1)
    other = Graph()
    other.key = "another kernel's"
    offered(other, tmp_path).call(layer, x)
    assert card.timed == 3


@torch.no_grad()
def test_a_graph_that_computes_something_else_is_dropped(
    card: Card, layer: Any, tmp_path: Path
) -> None:
    graph, x = Graph(1.1), rows(64)
    products = offered(graph, tmp_path)
    assert torch.equal(products.call(layer, x), layer(x))
    assert graph.calls == 1 and "relative L2" in graph.dropped
    products.call(layer, x)  # with those that are left
    assert (graph.calls, card.apart) == (1, 1)


@torch.no_grad()
def test_a_graph_takes_what_lies_as_it_must(card: Card, host: Host, tmp_path: Path) -> None:
    """All else is multiplied as without it."""
    graph = Graph()
    products, like = offered(graph, tmp_path), rows(1)
    other = torch.zeros(1, dtype=torch.float16)
    memory = torch.zeros(64 * 48 + 8, dtype=torch.int8)

    def taken(values: torch.Tensor, like: torch.Tensor = like) -> bool:
        weight = kitchen.Int8Weight(values, torch.ones(()), None)
        return products.own.of(like, weight) is not None

    assert taken(memory[: 64 * 48].view(64, 48))
    assert not taken(memory[: 64 * 40].view(64, 40))
    assert not taken(memory[: 40 * 48].view(40, 48))
    assert not taken(memory[8:].view(64, 48))
    assert not taken(memory[: 64 * 48].view(48, 64).T)
    assert not taken(memory[: 64 * 48].view(64, 48), other)
    graph.is_there = False
    assert not taken(memory[: 64 * 48].view(64, 48))


@torch.no_grad()
def test_a_captured_call_neither_compares_a_graph_nor_makes_anything_for_it(
    card: Card, layer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auxiliary, "is_capturing", lambda device: card.is_capturing)
    graph, x = Graph(), rows(64)
    products = offered(graph, tmp_path)
    card.is_capturing = True
    products.multiply(x, layer.weight, layer.bias)
    assert (card.timed, graph.calls) == (0, 0)
    card.is_capturing = False
    products.multiply(x, layer.weight, layer.bias)
    assert (card.timed, graph.calls) == (1, 1)
    card.is_capturing = True
    products.multiply(x, layer.weight, None)
    assert (card.timed, graph.calls, card.apart) == (1, 2, 0)


@torch.no_grad()
def test_sums_beyond_float16s_largest_number_stay_finite(
    card: Card, layer: Any, tmp_path: Path
) -> None:
    column = 6000.0 * hadamard()[:, 3].sign()
    x = column.repeat(4)[None].half()
    found = Int8Products(tmp_path, MACHINE).call(layer, x)
    truth = x.double() @ layer.weight.dequantize().double().T + layer.bias.double()
    assert card.apart == 1 and found.isfinite().all() and error(found, truth) < 2e-2


@torch.no_grad()
def test_rows_that_are_not_side_by_side_are_taken(card: Card, layer: Any, tmp_path: Path) -> None:
    whole = rows(2, 9)
    found = Int8Products(tmp_path, MACHINE).call(layer, whole[:, 2:7])
    assert torch.equal(found, Int8Products(tmp_path, MACHINE).call(layer, whole[:, 2:7].clone()))
    assert card.apart == 2


@torch.no_grad()
def test_times_decide_and_are_remembered(
    card: Card, layer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kitchen, "version", lambda: "1.2")
    products = Int8Products(tmp_path, MACHINE)
    for count in (2048, 2048, 2080):  # one class
        products.call(layer, rows(count // 32))
        products.call(layer, rows(count // 32))
    assert card.timed == 1 and card.apart == 6 and card.ways == {"host", "apart"}
    Int8Products(tmp_path, MACHINE).call(layer, rows(64))
    assert card.timed == 1 and card.apart == 7
    kept = json.loads((tmp_path / FILE_NAME).read_text())
    assert kept == {MACHINE: {"1.2 rotated bfloat16 1024 256 12": {"host": 1.0, "apart": 0.5}}}
    monkeypatch.setattr(kitchen, "version", lambda: "1.3")  # whose own kernel may be a quicker one
    Int8Products(tmp_path, MACHINE).call(layer, rows(64))
    assert card.timed == 2 and card.apart == 8
    card.times["apart"] = 0.999
    found = Int8Products(tmp_path, "another card").call(layer, rows(64))
    assert card.timed == 3 and card.apart == 8 and torch.equal(found, layer(rows(64)))


@torch.no_grad()
def test_what_the_host_computes_anew_or_otherwise_is_the_hosts(
    card: Card, layer: Any, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = Int8Products(tmp_path, MACHINE)
    x = rows(64)
    monkeypatch.setattr(layer, "weight_function", [lambda weight: 2 * weight])  # a LoRA's
    assert torch.equal(products.call(layer, x), layer(x)) and card.apart == 0
    monkeypatch.setattr(layer, "weight_function", [])
    monkeypatch.setattr(layer, "_forward", lambda input, weight, bias: input[..., :256])
    assert torch.equal(products.call(layer, x), x[..., :256]) and card.apart == 0
    other = layer_of("fp8_e4m3fn")
    assert torch.equal(products.call(other, x), other(x)) and card.apart == 0
    wide = rows(64, dtype=torch.float32)  # our kernel takes none in float32
    assert torch.equal(products.call(layer, wide), layer(wide)) and card.apart == 0
    assert card.timed == 0


@torch.no_grad()
def test_nothing_is_timed_or_made_while_a_call_is_captured(
    card: Card, layer: Any, tmp_path: Path
) -> None:
    products, x = Int8Products(tmp_path, MACHINE), rows(64)
    card.is_capturing = True
    assert torch.equal(products.call(layer, x), layer(x))
    card.is_capturing = False
    products.call(layer, x)
    assert card.timed == card.apart == 1
    card.is_capturing = True
    products.call(layer, x)
    assert card.apart == 2


@torch.no_grad()
def test_rows_that_the_library_does_not_multiply_are_the_hosts(
    card: Card, layer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    products, x = Int8Products(tmp_path, MACHINE), rows(64)

    def refuses(*_: Any) -> torch.Tensor:
        raise RuntimeError("not for this card")

    monkeypatch.setattr(kitchen, "multiply_int8_rows", refuses)
    for _ in range(2):
        assert torch.equal(products.call(layer, x), layer(x))
    assert card.timed == 1 and card.apart == 0
