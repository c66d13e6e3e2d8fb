"""Products by int8 weights, in the host's own layers: by what the library chose, or of rows that a
kernel of ours quantised: as near to the truth as the library's own, and only where that is quicker.
What a GPU would take is given; the kernel's very source runs on the processor.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.choices import int8_products, own_products, ways
from warmgraph_backends.choices.int8_products import FILE_NAME, Int8Products
from warmgraph_backends.families import int8_product
from warmgraph_backends.families.int8_product import LABEL
from warmgraph_backends.host_api import activations, kitchen
from warmgraph_backends.kernels import int8_rows, int8_sums
from warmgraph_backends.reasons import of
from warmgraph_backends.storing.folders import folder_keys
from warmgraph_tools import cuda_on_cpu
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.exact_rows import exact, hadamard
from warmgraph_tools.inprocess import Host

from .int8_graph import EXAMPLE
from .lab import Lab, relative, sampled
from .transformer_runs import EXPECTED

MACHINE = "card/torch"
PATH = "double_blocks.0.img_mlp.2"


class Card:
    """A GPU that takes these milliseconds; counts what was timed and what our kernel quantised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
        self.times = times
        self.timed = 0
        self.ways: set[str] = set()  # that were timed last
        self.apart = 0
        self.is_capturing = False

        def by_turns(runs: Any, *, are_short: bool) -> dict[str, float]:
            assert are_short
            self.timed += 1
            self.ways = set(runs)
            return {name: self.times[name] for name in runs}

        def multiply(*given: Any) -> torch.Tensor:
            self.apart += 1
            return product_of_rows(*given)

        def compile_kernel(source: str, name: str, *_: Any) -> Any:
            return cuda_on_cpu.compile_cuda(source, name)

        monkeypatch.setattr(int8_products, "_is_open", lambda input: True)
        monkeypatch.setattr(int8_products, "current_stream", lambda device: 0)
        monkeypatch.setattr(int8_rows, "compile_or_warn", compile_kernel)
        monkeypatch.setattr(int8_rows, "is_capturing", lambda device: self.is_capturing)
        monkeypatch.setattr(ways, "by_turns", by_turns)
        monkeypatch.setattr(kitchen, "multiply_int8_rows", multiply)
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing, raising=False
        )


def product_of_rows(
    rows: torch.Tensor,
    scales: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    stream: int,
) -> torch.Tensor:
    """What the library's kernel for GPUs gives (`kitchen.multiply_int8_rows`)."""
    found = torch._int_mm(rows, values.T).double() * scales.double() * scale.double().view(1, -1)
    return (found if bias is None else found + bias.double()).to(dtype)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch, {"host": 1.0, "apart": 0.5, "ours": 0.25})


def layer_of(form: str) -> Any:
    """A layer of the host's with int8 weights: 1024 to 256 features."""
    return transformers.load_quantised("flux1", form).model.diffusion_model.get_submodule(PATH)


@pytest.fixture(scope="module")
def layer(host: Host) -> Any:
    """One whose weights are rotated."""
    return layer_of("int8_convrot")


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, 1024, generator=torch.Generator().manual_seed(3)).to(dtype)


class Graph:
    """A graph that multiplies, with plain maths and a factor in its place; counts its calls."""

    def __init__(self, factor: float = 1.0) -> None:
        self.key = "0123456789abcdef"
        self.factor = factor
        self.calls = 0
        self.is_there = True
        self.dropped: Any = None

    @property
    def loaded(self) -> Any:
        return self if self.is_there and self.dropped is None else None

    def drop(self, reason: Any) -> None:
        self.dropped = reason

    def call(self, given: list[Any]) -> tuple[torch.Tensor]:
        self.calls += 1
        result = int8_sums.multiply(*given)
        given.clear()
        return (self.factor * result,)


def offered(graph: Graph, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Int8Products:
    products = Int8Products(directory, MACHINE)
    products.own.offer("cpu", dtype, graph)
    return products


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


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
    monkeypatch.setattr(own_products, "is_capturing", lambda device: card.is_capturing)
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


# --- several of one input -------------------------------------------------------------------------

#: Of 1024 features each.
SEVERAL = ("double_blocks.0.img_mlp.2", "double_blocks.1.img_mlp.2", "double_blocks.0.txt_mlp.2")


def several(form: str | Callable[[str], str]) -> list[tuple[Any, Any]]:
    """Weights with biases of three layers; the last one has none."""
    root = transformers.load_quantised("flux1", form).model.diffusion_model
    found = [root.get_submodule(path) for path in SEVERAL]
    return [*((layer.weight, layer.bias) for layer in found[:2]), (found[2].weight, None)]


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """What our kernel quantised, by its shape."""
    seen: list[torch.Size] = []
    quantise = int8_rows.Int8Rows.quantise

    def noted(kernel: Any, rows: torch.Tensor, **options: Any) -> Any:
        seen.append(rows.shape)
        return quantise(kernel, rows, **options)

    monkeypatch.setattr(int8_rows.Int8Rows, "quantise", noted)
    return seen


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


# --- in a model, and by the library ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "inputs", "products"),
    # Of Wan's ten products the first three share an input, and then two.
    [("flux1", 1, 1), ("wan", 7, 10)],
)
def test_a_compiled_model_multiplies_by_it(
    card: Card,
    host: Host,
    shared: Lab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantised: list[Any],
    kind: str,
    inputs: int,
    products: int,
) -> None:
    multiply, several = Int8Products.multiply, Int8Products.multiply_several

    def in_half(self: Int8Products, input: torch.Tensor, *others: Any) -> torch.Tensor:
        """As on a GPU: a processor's small models are in float32."""
        return multiply(self, input.bfloat16(), *others).to(input.dtype)

    def several_in_half(self: Int8Products, input: torch.Tensor, *others: Any) -> Any:
        return [each.to(input.dtype) for each in several(self, input.bfloat16(), *others)]

    monkeypatch.setattr(Int8Products, "multiply", in_half)
    monkeypatch.setattr(Int8Products, "multiply_several", several_in_half)
    model = transformers.load_quantised(kind, "int8_convrot")
    shared.compiled(model)
    lab = shared.copy_to(tmp_path / "lab")  # what takes which time is noted beside its graphs
    try:
        compiled = lab.compiled(model)
        prompt, latent = transformers.conditioning(kind, 13), transformers.latent(kind, 8, 8)
        eager, ours = sampled(host, (model, compiled), prompt, latent)
        assert relative(ours, eager) < 2e-2 and not torch.equal(ours, eager)
        report = lab.engine.report(compiled)
        assert report["regions"]["eager"] == report["calls"]["eager"] == 0, report["eager"]
        assert card.apart > 20 and products * len(quantised) == inputs * card.apart
    finally:
        lab.engine.close()


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models ask for a graph of products as on a GPU, which is tuned for small sizes here."""
    monkeypatch.setattr(int8_product, "is_for", lambda device: True)
    small = {
        name: replace(symbol, example=EXAMPLE[name])
        for name, symbol in int8_product.SYMBOLS.items()
    }
    monkeypatch.setattr(int8_product, "SYMBOLS", small)


def test_a_model_asks_for_the_graph_of_its_products(
    card: Card, host: Host, shared: Lab, helped: None, tmp_path: Path
) -> None:
    """As for those of its blocks: it is waited for, told of, filed, and loaded after a restart."""
    model, places = transformers.load_quantised("flux1", "int8"), EXPECTED["flux1"].places
    prompt, latent = transformers.conditioning("flux1", 13), transformers.latent("flux1", 8, 8)
    with pytest.MonkeyPatch.context() as before:
        before.setattr(int8_product, "is_for", lambda device: False)
        shared.compiled(model)
    lab = shared.copy_to(tmp_path / "lab")
    try:
        compiled = lab.compiled(model, graphs="mine")
        report = lab.engine.report(compiled)
        *blocks, product = report["kinds"]
        assert (product["kind"], product["places"], product["source"]) == (LABEL, 0, "built")
        assert report["builds"] == 1 and len(blocks) == EXPECTED["flux1"].kinds
        eager, ours = sampled(host, (model, compiled), prompt, latent)
        assert relative(ours, eager) < 2e-2
        report = lab.engine.report(compiled)
        assert report["regions"] == {"total": places, "compiled": places, "eager": 0}
        assert report["misses"] == [] and card.ways == {"host", "ours"}
        chosen = lab.engine._shared.choices.products.int8.ways.chosen
        assert set(chosen.values()) == {"ours"} and len(chosen) > 5
        lab.settle()
        (folder,) = lab.workflows.rglob("mine*")
        assert product["key"] in folder_keys(folder)
    finally:
        lab.engine.close()
    again = lab.copy_to(tmp_path / "again")
    try:
        compiled = again.compiled(model)
        assert again.counts(compiled) == (0, EXPECTED["flux1"].kinds + 1, 0)
        timed = card.timed
        (image,) = sampled(host, (compiled,), prompt, latent)
        assert torch.equal(image, ours) and card.timed == timed
        scope = compiled.get_attachment("warmgraph").scope
        served = scope.forwards.now.served
        scope.kinds[-1].graph.drop(of("dropped"))
        (image,) = sampled(host, (compiled,), prompt, latent)
        assert scope.forwards.now.served != served  # calls are captured anew
        report = again.engine.report(compiled)
        assert relative(image, eager) < 2e-2 and not torch.equal(image, ours)
        assert report["regions"] == {"total": places, "compiled": places, "eager": 0}
        assert [miss["kind"] for miss in report["misses"]] == [LABEL]
        assert f"{LABEL}: " in report["text"]
    finally:
        again.engine.close()


def test_only_models_with_such_layers_ask_for_it(host: Host, shared: Lab, helped: None) -> None:
    for form in (None, "fp8_e4m3fn"):
        model = transformers.load("flux1") if form is None else None
        model = model or transformers.load_quantised("flux1", form)
        compiled = shared.compiled(model, when_missing="never")
        kinds = shared.engine.report(compiled)["kinds"]
        assert len(kinds) == EXPECTED["flux1"].kinds and LABEL not in str(kinds)


def test_on_a_processor_nothing_asks_for_it(host: Host, shared: Lab) -> None:
    compiled = shared.compiled(
        transformers.load_quantised("flux1", "int8_convrot"), when_missing="never"
    )
    assert LABEL not in str(shared.engine.report(compiled)["kinds"])


@torch.inference_mode()
def test_the_librarys_own_function_is_asked_for_once_for_a_form(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is: also of weights that were not rotated, and of an input in pieces."""
    asked = []
    choose = kitchen.int8_product

    def counted(*sample: Any) -> Any:
        asked.append(sample[0].shape)
        return choose(*sample)

    monkeypatch.setattr(kitchen, "int8_product", counted)
    for form in ("int8", "int8_convrot"):
        model = transformers.load_quantised("flux1", form).model.diffusion_model
        layer = model.get_submodule(PATH)
        products = Int8Products(tmp_path, MACHINE)
        for x in (rows(1), rows(1), rows(2, 5), rows(2, 9)[:, 2:7]):
            assert torch.equal(products.call(layer, x), layer(x))
    assert asked == 2 * [(1, 1024), (2, 5, 1024)]


@torch.no_grad()
def test_a_library_that_chooses_in_another_way_is_called_as_the_host_does(
    layer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = importlib.import_module("comfy_kitchen.registry").BackendRegistry
    products, x = Int8Products(tmp_path, MACHINE), rows(3)
    expected = layer(x)
    weight = kitchen.int8_weight(layer.weight)
    assert weight is not None
    with monkeypatch.context() as patch:
        patch.delattr(known, "get_implementation")
        with pytest.raises(RuntimeError, match="not the known one"):
            kitchen.int8_product(x, weight, layer.bias)
        patch.setattr(known, "get_implementation", lambda *_, **__: other_product, raising=False)
        with pytest.raises(RuntimeError, match="not the known one"):
            kitchen.int8_product(x, weight, layer.bias)
    monkeypatch.setattr(kitchen, "int8_product", refusing)
    assert torch.equal(products.call(layer, x), expected)


def other_product(rows: Any, columns: Any) -> Any:
    raise AssertionError("not to be called")


def refusing(*_: Any) -> Any:
    raise RuntimeError("not the known one")
