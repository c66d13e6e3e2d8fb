"""A format of quantised weights is one row: what is known of it is all that its layers need."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from warmgraph_backends.host_api import formats
from warmgraph_backends.host_api.formats import FORMATS, Format
from warmgraph_backends.weights.addresses import AddressBook
from warmgraph_backends.weights.fetching import ModelWeights
from warmgraph_tools import quantised
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import Lab, relative
from .quantised_runs import LAYER, QUANTISED, Flux, flux

#: Formats that the pinned host does not have yet; the tools' table cannot have them either.
NEWER: frozenset[str] = frozenset()
NAME = "thirds_of_tomorrow"
ROW = Format(NAME, "thirds", may_be_captured=True, takes_memory_by_stream=True, is_offered=True)


class Thirds(torch.nn.Linear):
    """A layer of the made-up format: whole thirds of a number."""

    quant_format = NAME

    def __init__(self, layer: Any) -> None:
        super().__init__(layer.in_features, layer.out_features, device="meta")
        weight = layer.weight.dequantize().float()
        self.scale = weight.abs().max() / 127
        packed = (weight / self.scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.bias = torch.nn.Parameter(layer.bias.detach().clone(), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = (self.weight.float() * self.scale).to(input.dtype)
        return torch.nn.functional.linear(input, weight, self.bias.to(input.dtype))


def made() -> Any:
    """A small Flux 1 whose layers in int8 are of the made-up format."""
    model = transformers.load_quantised("flux1", "int8")
    root = model.model.diffusion_model
    for name, layer in list(root.named_modules()):
        if getattr(layer, "quant_format", None) == "int8_tensorwise":
            parent, _, own = name.rpartition(".")
            setattr(root.get_submodule(parent), own, Thirds(layer))
    assert type(root.get_submodule(LAYER)) is Thirds
    return model


@pytest.fixture(params=[True, False], ids=["captured", "not captured"])
def row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Format:
    import comfy.quant_ops

    row = dataclasses.replace(ROW, may_be_captured=request.param)
    monkeypatch.setitem(FORMATS, NAME, row)
    monkeypatch.setitem(comfy.quant_ops.QUANT_ALGOS, NAME, {})  # as the host would know it
    return row


def look(model: Any) -> AddressBook:
    """Where its weights are for a captured call."""
    root = model.model.diffusion_model
    weights = ModelWeights(root, torch.device("cpu"), torch.float32)
    weights.begin_run()
    weights.begin_step()
    book = AddressBook(root, weights)
    book.look()
    return book


def test_its_layers_are_served_named_and_captured_as_its_row_says(
    host: Host, shared: Lab, row: Format
) -> None:
    shared.compiled(flux("int8"))
    built = shared.builds()
    run = Flux(host, shared, made())
    ours, eager = run.images()
    assert eager.isfinite().all() and relative(ours, eager) < QUANTISED
    assert run.is_compiled() and shared.builds() == built
    notes = run.lab.engine.report(run.ours)["notes"]
    assert any(f"(quantised, {NAME}: multiplied as it is)" in note for note in notes), notes
    book = look(run.plain)
    if not row.may_be_captured:
        assert book.problem == f"products of {NAME} weights cannot be replayed"
        return
    addresses = book.look()
    assert addresses is not None and addresses.takes_memory_by_stream


def test_files_in_it_are_offered_where_others_are_unpacked(
    host: Host, shared: Lab, row: Format
) -> None:
    shared.compiled(flux("int8"))
    run = Flux(host, shared, flux("mxfp8"))
    notes = run.lab.engine.report(run.ours)["notes"]
    said = "this device unpacks it at each call; int8 or thirds files are multiplied as they are"
    assert any(said in note for note in notes), notes


def test_without_a_row_its_layers_are_the_hosts_in_everything(host: Host, shared: Lab) -> None:
    run = Flux(host, shared, made())
    assert relative(*run.images()) < QUANTISED and run.is_compiled()
    notes = run.lab.engine.report(run.ours)["notes"]
    assert any(f"(quantised, {NAME}: multiplied as it is)" in note for note in notes), notes
    assert look(run.plain).problem == f"products of {NAME} weights cannot be replayed"


def test_the_host_knows_each_row_by_its_name_and_layout(host: Host) -> None:
    from comfy.quant_ops import QUANT_ALGOS

    rows = {name: row.layout for name, row in FORMATS.items() if name not in NEWER}
    # Newer hosts know more.
    assert rows == {name: QUANT_ALGOS[name]["comfy_tensor_layout"] for name in rows}
    assert {each.marks["format"] for each in quantised.FORMATS.values()} == rows.keys()


def test_each_device_is_asked_by_a_function_of_the_host(host: Host) -> None:
    import comfy.model_management as management

    asked = {row.multiplied_where for row in FORMATS.values()} - {""}
    assert len(asked) > 2 and all(callable(getattr(management, name)) for name in asked)
    assert formats.quick_files() == ["int8"], "a processor"
