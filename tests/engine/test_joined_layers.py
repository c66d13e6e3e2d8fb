"""Layers of one input are one operator in a graph, and what they do comes out as by each of them:
the same bits, and others' code in them is called in the order of the host's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from warmgraph_backends.choices.int8_products import Int8Products
from warmgraph_backends.compilers.inductor import Inductor
from warmgraph_backends.contract import Program, RegionSpec
from warmgraph_backends.families.catalogue import plan_model
from warmgraph_backends.operators import host_layer
from warmgraph_backends.operators.call_context import using
from warmgraph_backends.operators.live_parts import LivePart
from warmgraph_backends.plans.plan import Place, Plan
from warmgraph_backends.plans.region_code import RegionCode
from warmgraph_backends.plans.specs import describe_live, describe_place
from warmgraph_backends.worker import export
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import Lab, relative
from .others import ROOT, Model
from .quantised_runs import QUANTISED
from .recorded_graphs import cuts
from .subject import reasons

Q, K, V = (f"self_attn.{name}" for name in "qkv")
#: By kind and form, the layers of each set.
SETS = {
    "wan": {"block": [(Q, K, V), ("cross_attn.k", "cross_attn.v")], "head": []},
    "zimage": {"layer": [("feed_forward.w1", "feed_forward.w3")], "last": []},
    "krea": {
        "single": [
            ("attn.wq", "attn.wk", "attn.wv", "attn.gate"),
            ("mlp.gate", "mlp.up"),
        ],
        "last": [],
    },
    "qwen": {
        "block": [
            ("attn.to_q", "attn.to_k", "attn.to_v"),
            ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        ]
    },
    # A product of queries, keys and values together.
    "flux1": {"double": [], "single": []},
    "h3": {"block": []},
    "sd3": {"joint": []},
}
SLOW = ("krea", "qwen", "flux1", "h3", "sd3")


def places_of(kind: str, file: str = "int8") -> Iterator[tuple[Place, RegionSpec]]:
    """A place of each form of a small quantised transformer."""
    plan = plan_model(transformers.load_quantised(kind, file).model.diffusion_model)
    assert isinstance(plan, Plan)
    for place in {place.form.name: place for place in plan.places}.values():
        yield place, describe_place(place, plan, dtype=torch.float32, device="cpu")


def sets_of(program: Program) -> list[tuple[str, ...]]:
    """The layers of each operator for several."""
    nodes = program.graph_module.graph.nodes
    return [tuple(node.args[1]) for node in nodes if node.target is host_layer.SEVERAL]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in SETS]
)
def test_layers_of_one_input_are_one_operator(host: Host, kind: str) -> None:
    found = {place.form.name: (place, made) for place, made in places_of(kind)}
    for form, sets in SETS[kind].items():
        place, description = found[form]
        program = export.export(RegionCode(description, place.form))
        assert sets_of(program) == sets
        named = [path for node in program.graph_module.graph.nodes for path in _paths(node)]
        assert sorted(named) == sorted(host_layer.paths(description.module))


def _paths(node: Any) -> Sequence[str]:
    if node.target is host_layer.SEVERAL:
        return list(node.args[1])
    return [node.args[1]] if node.target is host_layer.OPERATOR else []


def test_a_norm_that_others_may_have_stands_between_its_product_and_the_next(host: Host) -> None:
    place, description = next(places_of("wan"))
    norms = "self_attn.norm_k", "self_attn.norm_q"
    program = export.export(
        RegionCode(describe_live(place, description, LivePart(True, norms)), place.form)
    )
    assert sets_of(program) == [("cross_attn.k", "cross_attn.v")]
    calls = [path for node in program.graph_module.graph.nodes for path in _paths(node)]
    assert calls[:5] == [Q, "self_attn.norm_q", K, "self_attn.norm_k", V]


# --- what comes out -------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[Place, RegionSpec], Program]:
    """Exports a place in which each layer is an operator of its own."""

    def make(place: Place, description: RegionSpec) -> Program:
        with monkeypatch.context() as patch:
            patch.setattr(export, "join_layers", lambda graph_module: None)
            program = export.export(RegionCode(description, place.form))
        assert not sets_of(program)
        return program

    return make


def given_of(place: Place, description: RegionSpec, *but: str) -> dict[str, Any]:
    """What the layers of a place are multiplied by, where they need not be called."""
    layers = (
        (path, place.module.get_submodule(path)) for path in host_layer.paths(description.module)
    )
    return {path: (layer.weight, layer.bias) for path, layer in layers if path not in but}


@torch.no_grad()
@pytest.mark.parametrize(
    ("file", "called"),
    [
        pytest.param(file, called, marks=[] if i == n else pytest.mark.slow)
        for i, file in enumerate(("int8", "int8_convrot", "mxfp8"))
        for n, called in enumerate(((), (K,), (Q, K)))
    ],
    ids=str,
)
def test_the_same_bits_as_by_one_operator_for_each(
    host: Host,
    alone: Callable[[Place, RegionSpec], Program],
    tmp_path: Any,
    file: str,
    called: tuple[str, ...],
) -> None:
    """Whether layers are called, or multiplied without."""
    place, description = next(places_of("wan", file))
    joined, single = export.export(RegionCode(description, place.form)), alone(place, description)
    assert sets_of(joined) == SETS["wan"]["block"]
    weights, inputs = joined.example({symbol.name: 5 for symbol in description.symbols})
    given = {} if file == "mxfp8" else given_of(place, description, *called)
    with using(module=place.module, caller=Int8Products(tmp_path, "card"), given=given):
        (ours,), (expected,) = (p.graph_module(*weights, *inputs) for p in (joined, single))
    assert torch.equal(ours, expected) and ours.isfinite().all()


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form"), [("wan", "block"), ("qwen", "block")])
def test_the_same_bits_as_compiled_with_one_operator_for_each(
    host: Host,
    alone: Callable[[Place, RegionSpec], Program],
    tmp_path: Any,
    kind: str,
    form: str,
) -> None:
    place, description = next(each for each in places_of(kind) if each[0].form.name == form)
    results = []
    for program in (export.export(RegionCode(description, place.form)), alone(place, description)):
        weights, inputs = program.example({symbol.name: 5 for symbol in description.symbols})
        call = Inductor().load(Inductor().compile(program, measure=nullcontext).payload)
        given = given_of(place, description)
        with using(module=place.module, caller=Int8Products(tmp_path, "card"), given=given):
            results.append(call([*weights, *inputs]))
    assert all(map(torch.equal, *results))


class Products(Int8Products):
    """Notes what it is asked for at once."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.counts: list[int] = []

    def multiply_several(self, input: torch.Tensor, layers: Any, act: str = "") -> Any:
        self.counts.append(len(layers))
        return super().multiply_several(input, layers, act)


@torch.no_grad()
@pytest.mark.parametrize(
    ("called", "others", "counts"),
    [
        ((), (), [3, 2]),
        ((K,), (), [2, 2]),  # as by a LoRA at each call
        ((Q, K), (), [2]),
        ((K,), (K,), [2]),  # which may write into what the other two are given
    ],
    ids=["all", "but one", "but two", "others' code in one"],
)
def test_what_need_not_be_called_is_multiplied_at_once(
    host: Host, tmp_path: Any, called: Any, others: Any, counts: list[int]
) -> None:
    place, description = next(places_of("wan"))
    program = export.export(RegionCode(description, place.form))
    weights, inputs = program.example({symbol.name: 5 for symbol in description.symbols})
    products, given = Products(tmp_path, "card"), given_of(place, description, *called)
    with using(module=place.module, caller=products, given=given, others=others):
        program.graph_module(*weights, *inputs)
    assert products.counts == counts


@torch.no_grad()
def test_each_result_is_its_own_and_of_the_size_that_a_graph_counts_on() -> None:
    class Careless:
        """Gives the input itself, a part of something, and what is too wide."""

        def __init__(self, *widths: int) -> None:
            self.widths = widths

        def call(self, layer: Any, input: torch.Tensor) -> torch.Tensor:
            raise AssertionError("not to be called")

        def multiply(self, *_: Any) -> torch.Tensor:
            raise AssertionError("not to be called")

        def multiply_several(self, input: torch.Tensor, layers: Any, act: str = "") -> Any:
            return [input, *(input.new_ones(2, 8)[:, :width] for width in self.widths)]

    x, pair = torch.randn(2, 4), (torch.zeros(4, 4), None)
    given = {"a": pair, "b": pair}
    with using(module=torch.nn.Module(), caller=Careless(4), given=given):
        one, other = host_layer.SEVERAL(x, ["a", "b"], [4, 4], "")
    assert torch.equal(one, x) and one.data_ptr() != x.data_ptr() and other.is_contiguous()
    too_wide = using(module=torch.nn.Module(), caller=Careless(5), given=given)
    with too_wide, pytest.raises(ValueError, match="b must give"):
        host_layer.SEVERAL(x, ["a", "b"], [4, 4], "")
    stand_ins = host_layer.SEVERAL(x, ["a", "b"], [4, 6], "")
    for found, path in zip(stand_ins, "ab", strict=True):
        assert torch.equal(found, host_layer.OPERATOR(x, path, found.shape[-1], ""))


# --- in a model -----------------------------------------------------------------------------------


@pytest.fixture
def wan(host: Host, shared: Lab) -> Model:
    return Model(host, shared, "wan", transformers.load_quantised("wan", "int8"))


def noting(names: Sequence[str], calls: list[str]) -> Callable[[Any], Any]:
    """What a pack does that puts its own forward on some parts of each block."""

    def patch(model: Any) -> Any:
        clone = model.clone()
        for number in range(len(model.model.diffusion_model.blocks)):
            for name in names:
                path = f"{ROOT}.blocks.{number}.{name}"
                part = model.get_model_object(path)
                clone.add_object_patch(f"{path}.forward", functools.partial(noted, path, part))
        return clone

    def noted(path: str, part: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(path)
        result: torch.Tensor = type(part).forward(part, x)
        return result + torch.linspace(0.0, 1.0, result.shape[-1])  # norms take factors away

    return patch


@pytest.mark.parametrize(
    "names",
    [
        (Q, K, V, "self_attn.o", *(f"cross_attn.{name}" for name in "qkvo"), "ffn.0", "ffn.2"),
        (K,),
        (V, "cross_attn.q"),
        (Q, "self_attn.norm_q", K, V),
    ],
    ids=["all", "one", "two", "a norm between"],
)
def test_others_code_is_called_in_the_order_of_eager(wan: Model, names: Sequence[str]) -> None:
    calls: list[str] = []
    patch = noting(names, calls)
    ours = patch(wan.compiled)
    wan.sample(ours)
    wan.settled(ours)
    wan.sample(ours)  # compared with the host's maths
    calls.clear()
    image = wan.sample(ours)
    found = list(calls)
    calls.clear()
    eager = wan.sample(patch(wan.plain))
    called = {name for name in names if any(path.endswith(name) for path in calls)}
    assert found == calls and len(calls) >= 4 * len(called)
    assert set(names) - called <= {"ffn.2"}  # whose weight newer hosts take without calling it
    assert relative(image, eager) < 2 * QUANTISED < relative(eager, wan.sample(wan.plain))
    assert reasons(wan.report(ours)) == {}


def test_a_lora_on_one_of_a_set_is_in_the_image_and_builds_nothing(wan: Model) -> None:
    built, layer = wan.lab.jobs(), f"{ROOT}.blocks.1.{K}.weight"
    shape = wan.plain.model.get_parameter(layer).shape
    change = 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(9))
    images = []
    for model in (wan.compiled, wan.plain):
        clone = model.clone()
        assert clone.add_patches({layer: ("diff", (change,))}) == [layer]
        images.append(wan.sample(clone))
    assert relative(*images) < 2 * QUANTISED < relative(images[0], wan.sample(wan.compiled))
    assert reasons(wan.report(wan.compiled)) == {} and wan.lab.jobs() == built


def test_a_set_is_cut_out_of_a_captured_place_as_one(wan: Model) -> None:
    """Where one of its layers fetches its own weights, as under a LoRA at each call."""
    wan.sample(wan.compiled)
    before = cuts(lambda: wan.sample(wan.compiled, steps=1))
    layer = wan.plain.model.diffusion_model.blocks[1].get_submodule(K)
    layer.weight_function = [lambda weight: 1.5 * weight]
    try:
        wan.sample(wan.compiled)
        after = cuts(lambda: wan.sample(wan.compiled, steps=1))
    finally:
        layer.weight_function = []
    fetches = "a layer that fetches its own weights runs between what is replayed"
    assert after[fetches] - before[fetches] == 1
