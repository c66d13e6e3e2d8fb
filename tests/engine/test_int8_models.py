"""Models with int8 weights multiply as was timed as quickest, and ask for the graph of products;
the library's own function is asked for once.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.choices.int8_products import Int8Products
from warmgraph_backends.families import int8_product
from warmgraph_backends.families.int8_product import LABEL
from warmgraph_backends.host_api import kitchen
from warmgraph_backends.reasons import of
from warmgraph_backends.storing.folders import folder_keys
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .int8_card import MACHINE, PATH, TIMES, Card, layer_of, noting_rows, refusing, rows
from .int8_graph import EXAMPLE
from .lab import Lab, relative, sampled
from .transformer_runs import EXPECTED


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch, TIMES)


@pytest.fixture(scope="module")
def layer(host: Host) -> Any:
    """One whose weights are rotated."""
    return layer_of("int8_convrot")


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    return noting_rows(monkeypatch)


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

    def in_half(self: Int8Products, input: torch.Tensor, weight: Any, *others: Any) -> torch.Tensor:
        """As on a GPU: a processor's small models are in float32."""
        if kitchen.int8_weight(weight) is None:
            return multiply(self, input, weight, *others)
        return multiply(self, input.bfloat16(), weight, *others).to(input.dtype)

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
