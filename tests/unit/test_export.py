"""Exporting a kind: weights become inputs, sizes stay symbols, and what narrows them is refused."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch

from warmgraph_backends.compilers.inductor import Inductor
from warmgraph_backends.contract import Program, RegionSpec, Symbol
from warmgraph_backends.errors import BuildError, DescriptionError
from warmgraph_backends.families import int8_product
from warmgraph_backends.families.catalogue import code_of, plan_model
from warmgraph_backends.plans.region_code import RegionCode
from warmgraph_backends.plans.specs import describe_place
from warmgraph_backends.target import keys
from warmgraph_backends.worker import build
from warmgraph_backends.worker.export import export
from warmgraph_tools.inprocess import Host


@pytest.fixture(scope="module")
def descriptions(host: Host) -> dict[str, RegionSpec]:
    """One description of each form of a narrow SDXL."""
    model = host.load("narrowxl")[0].model.diffusion_model
    plan = plan_model(model)
    assert not isinstance(plan, str)
    places = {place.form.name: place for place in plan.places}
    return {
        name: describe_place(place, plan, dtype=torch.float32, device="cpu")
        for name, place in places.items()
    }


def captured(description: RegionSpec) -> Program:
    return export(code_of(description))


def test_weights_become_inputs_by_name_and_sizes_stay_symbols(
    descriptions: dict[str, RegionSpec],
) -> None:
    description = descriptions["up"]
    program = captured(description)
    assert [w.name for w in program.weights] == ["conv.weight", "conv.bias"]
    assert program.weights[0].shape == (64, 64, 3, 3)
    assert program.weights[0].dtype == "float32"
    placeholders = [n for n in program.graph_module.graph.nodes if n.op == "placeholder"]
    assert len(placeholders) == len(program.weights) + len(description.inputs)
    batch, channels, height, width = placeholders[2].meta["val"].shape
    assert channels == 64
    assert all(isinstance(size, torch.SymInt) for size in (batch, height, width))
    assert 3.9 < program.work <= 4  # the output has about four times the elements of the input


def test_the_exported_graph_computes_eagers_values_at_other_sizes(
    descriptions: dict[str, RegionSpec],
) -> None:
    program = captured(descriptions["entry"])
    for sizes in ({"batch": 3, "height": 5, "width": 9}, {"batch": 2, "height": 4, "width": 2}):
        weights, inputs = program.example(sizes)
        with torch.no_grad():
            results = program.graph_module(*weights, *inputs)
        torch.testing.assert_close(tuple(results), program.run(weights, inputs))


def test_examples_of_int8_are_whole_numbers_that_say_something(host: Host) -> None:
    """Not zeros, as of an index; and float16 holds sums of their products."""
    description = int8_product.describe(torch.float16, "cpu")
    program = captured(description)
    weights, inputs = program.example({"rows": 64, "columns": 8, "width": 32})
    assert weights == [] and inputs[0].dtype is inputs[2].dtype is torch.int8
    for values in (inputs[0], inputs[2]):
        assert 7 < float(values.float().std()) < 9 and abs(float(values.float().mean())) < 0.5
    (result,) = program.run(weights, inputs)
    assert result.isfinite().all() and float(result.float().std()) > 1


def test_the_same_kind_is_exported_to_the_same_graph(
    descriptions: dict[str, RegionSpec],
) -> None:
    first, second = (captured(descriptions["down"]) for _ in range(2))
    assert first.graph_module.code == second.graph_module.code
    assert first.weights == second.weights


class _Noting:
    """A form that notes whether cuDNN is on where it is traced."""

    def __init__(self, form: Any) -> None:
        self._form, self.seen = form, set[bool]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._form, name)

    def computed(self, *args: Any) -> Any:
        self.seen.add(torch.backends.cudnn.enabled)
        return self._form.computed(*args)


@pytest.mark.parametrize("enabled", [True, False])
def test_convolutions_are_traced_as_they_run(
    descriptions: dict[str, RegionSpec], enabled: bool
) -> None:
    """`torch.export` turns cuDNN off; results would lie otherwise in memory than they do."""
    description = descriptions["up"]
    form = _Noting(code_of(description).form)
    with torch.backends.cudnn.flags(enabled=enabled):
        export(RegionCode(description, form))
        assert form.seen == {enabled}
        assert torch.backends.cudnn.enabled == enabled


def test_code_that_fixes_a_size_is_refused(descriptions: dict[str, RegionSpec]) -> None:
    """The declared range must hold afterwards; here the host's code only takes 64 channels."""
    description = descriptions["up"]
    x = dataclasses.replace(description.inputs[0], dims=("batch", "channels", "height", "width"))
    changed = dataclasses.replace(
        description,
        inputs=(x, *description.inputs[1:]),
        symbols=(*description.symbols, Symbol("channels", 1, 512, 64)),
    )
    with pytest.raises(BuildError, match="Upsample 64"):
        captured(changed)


def test_a_class_that_is_not_there_is_named(descriptions: dict[str, RegionSpec]) -> None:
    module: dict[str, Any] = {**descriptions["up"].module, "class": "no_such_package:Upsample"}
    with pytest.raises(DescriptionError, match="no_such_package:Upsample cannot be imported"):
        captured(dataclasses.replace(descriptions["up"], module=module))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("sources", "the worker sees other host code for Upsample 64: a:B.forward"),
        ("key", "the worker's torch or options differ from the server's"),
    ],
)
def test_a_build_for_another_host_or_torch_is_refused_before_anything_is_exported(
    descriptions: dict[str, RegionSpec], change: str, words: str
) -> None:
    description = descriptions["up"]
    if change == "sources":
        sources = {**description.sources, "a:B.forward": "0123456789abcdef"}
        description = dataclasses.replace(description, sources=sources)
    task = {
        "description": description.to_dict(),
        "backend": "inductor",
        "key": "0" * 64
        if change == "key"
        else keys.graph_key(description, keys.target("cpu", Inductor())),
    }
    with pytest.raises(BuildError, match=words):
        build.run(task, measure=contextlib.nullcontext)
