"""Modules written down as plain data, and twins that compute the same without a constructor."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from warmgraph_backends.code.sources import attributes_read
from warmgraph_backends.errors import DescriptionError
from warmgraph_backends.families.catalogue import plan_model
from warmgraph_backends.plans.describe import describe_module, make_twin, named_code
from warmgraph_backends.plans.specs import describe_place, quick_signature
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.small_kinds import KINDS, UNKNOWN, WHOLE


class Scaled(torch.nn.Module):
    """Reads two attributes, one of them private; a third is nobody's business."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self._power = 2
        self.unread = object()
        self.sizes = (1, [2, 3], None)
        self.dtype = torch.float16
        self.inner = torch.nn.Conv2d(4, 6, 3, stride=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale**self._power + len(self.sizes) + self.dtype.itemsize


def _twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def describe(module: torch.nn.Module, **options: Any) -> dict[str, Any]:
    return describe_module(module, reads=attributes_read, dtype=lambda m, n, t: t.dtype, **options)


def test_a_twin_computes_what_the_module_does_after_a_trip_through_json() -> None:
    module = Scaled().eval()
    data = json.loads(json.dumps(describe(module)))
    weights = iter(p.detach() for p in module.parameters())
    twin = make_twin(data, lambda shape, dtype: next(weights))
    x = torch.randn(1, 4, 9, 7)
    assert torch.equal(twin(x), module(x))
    assert type(twin) is Scaled and not twin.training
    assert twin.sizes == (1, [2, 3], None) and twin.dtype is torch.float16
    assert not hasattr(twin, "unread")


class Buffered(torch.nn.Module):
    """Multiplies by a buffer that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([2.0, 3.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x * self.table
        return result


def test_a_buffer_that_code_reads_by_name_is_a_weight() -> None:
    data = json.loads(json.dumps(describe(Buffered())))
    assert data["parameters"] == {"table": {"shape": [2], "dtype": "float32"}}
    twin = make_twin(data, lambda shape, dtype: torch.tensor([5.0, 7.0], dtype=dtype))
    assert torch.equal(twin(torch.ones(1, 2)), torch.tensor([[5.0, 7.0]]))


def test_only_attributes_that_code_reads_are_written_down() -> None:
    attributes = describe(Scaled())["attributes"]
    assert set(attributes) == {"scale", "_power", "sizes", "dtype"}


def test_the_order_in_which_attributes_were_set_does_not_matter() -> None:
    module, other = Scaled(), Scaled()
    del other.scale
    other.scale = 2.0
    assert list(vars(module)) != list(vars(other))
    assert json.dumps(describe(module)) == json.dumps(describe(other))


def test_host_bookkeeping_is_not_written_down(host: Host) -> None:
    import comfy.ops

    layer = comfy.ops.manual_cast.Linear(8, 8)
    before = describe(layer)
    layer.comfy_cast_weights = False
    layer.weight_function = [lambda weight: weight]
    layer.bias_function = []
    layer.weight_comfy_model_dtype = torch.float16
    layer._v = object()
    layer._v_signature = b"x"
    layer._pin_state = {}
    assert describe(layer) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "scale", torch.ones(1)), "attribute scale .* is a Tensor"),
        (lambda m: setattr(m, "_power", object()), "attribute _power .* is a object"),
        (lambda m: m.register_buffer("table", torch.ones(2)), "has buffers"),
        (lambda m: m.inner.register_parameter("weight", Foreign(torch.ones(1))), "is a Foreign"),
    ],
)
def test_what_is_not_plain_data_is_refused_by_name(change: Any, words: str) -> None:
    module = Scaled()
    change(module)
    with pytest.raises(DescriptionError, match=words):
        describe(module)


class Foreign(torch.nn.Parameter):
    """A quantised weight, say."""


def test_a_class_made_at_run_time_is_refused_by_name() -> None:
    class Local(torch.nn.Module):
        pass

    with pytest.raises(DescriptionError, match="Local is made at run time"):
        describe(Local())


@pytest.mark.parametrize("name", ["no_such_package:Thing", "torch.nn:NoSuchLayer"])
def test_a_class_that_cannot_be_imported_is_named(name: str) -> None:
    data = {**describe(torch.nn.SiLU()), "class": name}
    with pytest.raises(DescriptionError, match=f"{name} cannot be imported"):
        make_twin(data, torch.empty)


def test_left_out_children_are_in_neither_description_nor_classes() -> None:
    module = torch.nn.Sequential(torch.nn.SiLU(), Scaled())
    assert [name for name, _ in describe(module, children=("0",))["modules"]] == ["0"]
    assert set(named_code(describe(module, children=("0",)))[0]) == {
        torch.nn.Sequential,
        torch.nn.SiLU,
    }
    assert set(named_code(describe(module))[0]) == {
        torch.nn.Sequential,
        torch.nn.SiLU,
        Scaled,
        torch.nn.Conv2d,
    }


def test_a_function_kept_as_an_attribute_is_named_and_comes_back() -> None:
    module = Scaled()
    module.scale = _twice  # type: ignore[assignment]
    data = describe(module)
    assert data["attributes"]["scale"] == {"function": f"{__name__}:_twice"}
    assert named_code(data)[1] == [_twice]
    assert make_twin(data, lambda shape, dtype: torch.empty(shape)).scale is _twice


def test_a_function_that_no_name_leads_to_is_refused() -> None:
    module = Scaled()
    module.scale = lambda x: x  # type: ignore[assignment]
    with pytest.raises(DescriptionError, match="scale"):
        describe(module)


def test_every_place_of_a_host_model_has_a_twin(host: Host) -> None:
    model, _, _ = host.load("narrowxl")
    plan = plan_model(model.model.diffusion_model)
    assert not isinstance(plan, str)
    for place in {quick_signature(p): p for p in plan.places}.values():
        description = describe_place(place, plan, dtype=torch.float32, device="cpu")
        twin = make_twin(
            json.loads(json.dumps(description.module)),
            lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"),
        )
        kept = place.form.children
        names = {
            name: parameter.shape
            for name, parameter in place.module.named_parameters()
            if kept is None or name.partition(".")[0] in kept
        }
        assert {name: p.shape for name, p in twin.named_parameters()} == names


def test_places_that_differ_only_in_a_tuple_are_two_kinds(host: Host) -> None:
    """Padding and dilation show in no weight's shape."""
    model, _, _ = host.load("narrowxl")
    plan = plan_model(model.model.diffusion_model)
    assert not isinstance(plan, str)
    by_signature: dict[Any, list[Any]] = {}
    for place in plan.places:
        if place.form.name == "residual":
            by_signature.setdefault(quick_signature(place), []).append(place)
    first, second = next(places for places in by_signature.values() if len(places) > 1)[:2]
    second.module.in_layers[2].dilation = (2, 2)
    second.module.in_layers[2].padding = (2, 2)
    assert quick_signature(first) != quick_signature(second)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*WHOLE, *UNKNOWN)])
def test_a_transformer_is_described_once_a_kind(host: Host, kind: str) -> None:
    if not transformers.is_there(kind):
        pytest.skip(f"this ComfyUI has no {kind}")
    """And not once a block, by a number that each was given: a prompt would wait for that."""
    if not transformers.is_here(kind):
        pytest.skip("this host has no such model")
    plan = plan_model(transformers.make(kind).diffusion_model)
    assert not isinstance(plan, str)
    places = {quick_signature(place): place for place in plan.places}
    described = [
        repr(describe_place(place, plan, dtype=torch.float32, device="cpu"))
        for place in places.values()
    ]
    assert len(set(described)) == len(described) < len(plan.places)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_that_dynamic_vram_loads_late_is_the_same_layer(
    host: Host, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.memory_management
    import comfyui_version
    from comfy.ops import disable_weight_init

    early = disable_weight_init.Linear(4, 8, bias=bias)
    for parameter in early.parameters():  # it has whatever the memory had
        torch.nn.init.normal_(parameter)
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    late = disable_weight_init.Linear(4, 8, bias=bias)
    if late.weight is not None:
        assert comfyui_version.__version__ == "0.27.0"
        pytest.skip("this host makes the weights of a layer at once")
    late.load_state_dict(early.state_dict())
    assert describe(late) == describe(early)
    weights = iter([p.detach() for p in early.parameters()])
    x = torch.randn(2, 4)
    assert torch.equal(make_twin(describe(late), lambda *_: next(weights))(x), early(x))
