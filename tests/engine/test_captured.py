"""Which calls may be captured, without a GPU: by signatures, weights' places and others' code."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch

from warmgraph_backends.code.watch import Watch
from warmgraph_backends.cuda_graphs.signatures import (
    CaptureError,
    arithmetic,
    read_call,
    result_form,
    run_steps,
)
from warmgraph_backends.cuda_graphs.streams import OwnStreams
from warmgraph_backends.families.catalogue import may_be_captured, unread_options
from warmgraph_backends.runtime.wiring import Wiring, replaced_function
from warmgraph_backends.weights.addresses import AddressBook
from warmgraph_backends.weights.fetching import ModelWeights
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.quantised import FORMATS

from .lab import TOLERANCE, Lab
from .probed import Probed


def _options(**more: Any) -> dict[str, Any]:
    return {"sigmas": torch.ones(1), "cond_or_uncond": [1, 0], "wrappers": {}, **more}


def _arguments(batch: int = 2, tokens: int = 77, **options: Any) -> tuple[Any, ...]:
    x, t = torch.randn(batch, 4, 8, 8), torch.rand(batch)
    return x, t, torch.randn(batch, tokens, 16), None, None, _options(**options)


def test_a_signature_holds_sizes_and_not_values(host: Host) -> None:
    unread = unread_options(host.load("narrowxl")[0].model.diffusion_model)

    def key(*args: Any) -> Any:
        return read_call(args, {}, unread).key

    first = key(*_arguments())
    assert key(*_arguments()) == first
    assert key(*_arguments(cond_or_uncond=[0, 1])) == first
    assert key(*_arguments(batch=3)) != first
    assert key(*_arguments(tokens=154)) != first
    assert key(*(a.half() if torch.is_tensor(a) else a for a in _arguments())) != first
    x, *rest = _arguments()
    assert key(x.transpose(2, 3), *rest) != first
    assert read_call(_arguments(cond_or_uncond=[0, 1]), {}).key != read_call(_arguments(), {}).key


def test_residuals_are_inputs_and_are_used_up_for_the_copy_only(host: Host) -> None:
    control = {"input": [torch.ones(2, 4, 8, 8), None], "middle": [], "output": [torch.ones(1)]}
    args = [*_arguments()]
    args[4] = control
    call = read_call(args, {})
    assert len(call.tensors) == 6  # x, t, context, two residuals, sigmas
    others = [torch.zeros_like(t) for t in call.tensors]
    copied, _ = call.over(others)
    assert copied[4]["input"][0] is others[3] and copied[4]["input"][1] is None
    copied[4]["input"].pop()
    assert len(control["input"]) == 2
    assert read_call(_arguments(), {}).key != call.key


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"patches": {"attn1_patch": [print]}}, "patches may do something else"),
        ({"patches_replace": {"attn1": {("input", 1): print}}}, "attention may do"),
        ({"optimized_attention_override": print}, "attention may do"),
        ({"of_another_node": object()}, "of_another_node has a object"),
        ({"of_another_node": OrderedDict(a=1)}, "of_another_node has a OrderedDict"),
        ({"mask": torch.ones(1, device="meta"), "area": torch.ones(1)}, "area is on the CPU"),
    ],
)
def test_what_another_node_does_in_the_call_is_not_captured(
    options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CaptureError, match=reason):
        read_call(_arguments(**options), {})
    read_call(_arguments(patches={}, patches_replace={}), {})


def test_how_many_steps_a_run_has_is_asked_of_its_sigmas_alone() -> None:
    sigmas = torch.ones(21, device="meta")  # of which nothing could be read
    options = {"sample_sigmas": sigmas}
    assert run_steps(_arguments(**options), {}) == 20
    assert run_steps(_arguments(), {}) is None


@pytest.fixture
def book(host: Host) -> tuple[Any, ModelWeights, AddressBook]:
    model = host.load("narrowxl")[0].model
    weights = ModelWeights(model, torch.device("cpu"), torch.float32)
    weights.begin_run()
    return model.diffusion_model, weights, AddressBook(model.diffusion_model, weights)


def test_weights_that_moved_are_noticed(book: tuple[Any, ModelWeights, AddressBook]) -> None:
    root, weights, place = book
    weights.begin_step()
    first = place.look()
    assert first is not None and place.look() is first
    assert len(first.pointers) == len(list(root.parameters())) + len(list(root.buffers()))
    layer = root.out[2]
    before = layer.weight
    try:
        layer.weight = torch.nn.Parameter(before.clone(), requires_grad=False)
        second = place.look()
        assert second is not None and second.pointers != first.pointers
    finally:
        layer.weight = before
    weights.begin_run()
    assert place.look() is not first


def test_weights_that_a_graph_cannot_read_are_named(
    book: tuple[Any, ModelWeights, AddressBook],
) -> None:
    root, weights, place = book
    layer = root.out[2]
    layer.weight_function = [lambda weight: weight]
    try:
        assert place.look() is None
        assert place.problem == "weights are computed anew at each call"
    finally:
        del layer.weight_function
    weights.begin_run()
    before = layer.weight
    try:
        layer.weight = torch.nn.Parameter(before.to("meta"), requires_grad=False)
        assert place.look() is None
        assert place.problem == "a part of the model is not in VRAM"
    finally:
        layer.weight = before


REPLAYED = ("fp8_e4m3fn", "fp8_e4m3fn_inputs", "int8", "int8_convrot")


def _book_of(form: str) -> AddressBook:
    root = transformers.load_quantised("flux1", form).model.diffusion_model
    weights = ModelWeights(root, torch.device("cpu"), torch.float32)
    weights.begin_run()
    weights.begin_step()
    return AddressBook(root, weights)


@pytest.mark.parametrize("form", [form for form in FORMATS if form not in REPLAYED])
def test_products_that_were_not_tried_in_a_capture_are_not_captured(host: Host, form: str) -> None:
    place = _book_of(form)
    assert place.look() is None
    assert (
        place.problem == f"products of {FORMATS[form].marks['format']} weights cannot be replayed"
    )


@pytest.mark.parametrize("form", REPLAYED)
def test_products_that_take_memory_by_stream_are_told_from_others(host: Host, form: str) -> None:
    """The host's library takes it for each stream and size: a capture would end the process."""
    addresses = _book_of(form).look()
    assert addresses is not None
    assert addresses.takes_memory_by_stream == form.startswith("int8")


def test_a_stream_of_its_own_serves_one_captured_call_at_a_time() -> None:
    made: list[object] = []

    def make(device: torch.device) -> object:
        made.append(object())
        return made[-1]

    own, first, second = OwnStreams(make), torch.device("cuda:0"), torch.device("cuda:1")
    one, other, elsewhere = own.take(first), own.take(first), own.take(second)
    assert [each.stream for each in (one, other, elsewhere)] == made
    one.held_bytes = 7
    own.give_back(first, one)
    assert own.take(second).stream is made[3], "one device's streams are of no use to another"
    assert own.take(first) is one and one.held_bytes == 7
    assert own.take(first).stream is made[4]


def test_a_quantised_weight_is_known_by_its_parts(host: Host) -> None:
    root = transformers.load_quantised("flux1", "fp8_e4m3fn").model.diffusion_model
    weights = ModelWeights(root, torch.device("cpu"), torch.float32)
    weights.begin_run()
    weights.begin_step()
    place = AddressBook(root, weights)
    first = place.look()
    assert first is not None and place.problem is None
    layer = root.double_blocks[0].img_mlp[0]
    parts = [layer.weight._qdata.data_ptr(), layer.weight.params.scale.data_ptr()]
    assert set(parts) <= set(first.pointers)
    assert all(type(part) in (torch.Tensor, torch.nn.Parameter) for part in first.loose)
    assert place.look() is first
    before = layer.weight
    layer.weight = torch.nn.Parameter(before.clone(), requires_grad=False)  # as a LoRA leaves it
    second = place.look()
    assert second is not None and second.pointers != first.pointers


def test_weights_are_not_kept_beyond_a_run(lab: Lab, host: Host) -> None:
    model = Probed(lab, host)
    model.sample(steps=2)
    scope = model.model.get_attachment("warmgraph").scope
    place = AddressBook(scope.root, scope._bound.weights)
    assert place.look() is not None
    place.forget()
    layer = model.unet.input_blocks[1][0].in_layers[2]
    before = weakref.ref(layer.weight)
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    gc.collect()
    assert before() is None


def test_code_of_others_is_found_wherever_it_hides(host: Host) -> None:
    from comfy.ldm.modules.diffusionmodules import openaimodel

    root = host.load("narrowxl")[0].model.diffusion_model
    watch, wiring = Watch(), Wiring(root)
    assert replaced_function(root, watch) is None and wiring.foreign() is None
    before = openaimodel.timestep_embedding
    openaimodel.timestep_embedding = lambda *args, **kwargs: before(*args, **kwargs)
    try:
        assert watch.changed()
        assert "code of another package takes part" in (replaced_function(root, Watch()) or "")
    finally:
        openaimodel.timestep_embedding = before

    layer = root.out[2]

    class Quantised(type(layer)):  # type: ignore[misc]
        """As packs of other formats have them: a cast of its own, the host's forward."""

    own = layer.__class__
    layer.__class__ = Quantised
    try:
        assert wiring.foreign() == "another node replaces the code of Quantised"
    finally:
        layer.__class__ = own
    layer._conv_forward = print
    try:
        assert wiring.foreign() == "another node replaces the forward of a Conv2d"
    finally:
        del layer._conv_forward
    attributes = wiring.attributes
    attributes.look()
    assert attributes.set_since == []
    layer.padding_mode = "circular"
    try:
        attributes.look()
        [(module, reason)] = attributes.set_since
        assert module is layer and reason == "another node sets padding_mode of a Conv2d"
    finally:
        layer.padding_mode = "zeros"


def test_a_node_that_makes_images_tile_is_obeyed_from_the_next_run_on(lab: Lab, host: Host) -> None:
    probed = Probed(lab, host, when_missing="never")  # nothing is left to be built behind the test
    lab.settle()
    probed.check()
    layers = [m for m in probed.unet.modules() if isinstance(m, torch.nn.Conv2d)]
    for layer in layers:
        layer.padding_mode = "circular"
    try:
        jobs = lab.jobs()
        probed.sample(probed.model)
        assert lab.jobs() == jobs
        assert max(call.error for call in probed.probe.calls) <= TOLERANCE
    finally:
        for layer in layers:
            layer.padding_mode = "zeros"
    probed.check()


def test_what_may_be_captured_is_known_by_class(host: Host) -> None:
    from comfy.cldm.cldm import ControlNet

    assert may_be_captured(host.load("narrowxl")[0].model.diffusion_model)
    assert not may_be_captured(torch.nn.Linear(2, 2))
    control = ControlNet.__new__(ControlNet)
    torch.nn.Module.__init__(control)
    assert may_be_captured(control)
    control.control_add_embedding = torch.nn.Identity()  # what makes it a union
    assert not may_be_captured(control)


def test_settings_of_the_arithmetic_are_part_of_a_signature() -> None:
    before = arithmetic()
    allowed = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not allowed
    try:
        assert arithmetic() != before
    finally:
        torch.backends.cudnn.benchmark = allowed
    assert arithmetic() == before


def test_a_result_is_remembered_by_its_form_alone() -> None:
    residuals = {"output": [torch.ones(2, 4, 8, 8).to(memory_format=torch.channels_last), None]}
    form = result_form(residuals)
    assert [tensor.device.type for tensor in form.tensors] == ["meta"]
    assert form.tensors[0].stride() == residuals["output"][0].stride()
    rebuilt = form.over([torch.zeros(1)])[0][0]
    assert rebuilt["output"][0].shape == (1,) and rebuilt["output"][1] is None
    with pytest.raises(CaptureError, match="returns no tensor"):
        result_form("nothing")


def test_exact_needs_a_gpu_and_says_so(lab: Lab, host: Host) -> None:
    model = host.load("narrowxl")[0]
    exact = lab.engine.compile_model(model, form="exact")
    report = lab.engine.report(exact)
    assert report["regions"]["total"] == 0
    assert "that needs an NVIDIA GPU" in report["notes"][0]
