"""The list of model families, and modules of which a family's form uses a part."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warmgraph_backends.contract import WeightSpec
from warmgraph_backends.families import adapter, unet
from warmgraph_backends.families import catalogue as registry
from warmgraph_backends.host_api.memory import spare_vram
from warmgraph_backends.plans.describe import describe_module, import_named, make_twin
from warmgraph_backends.plans.plan import Place, Plan, dispatch_one
from warmgraph_backends.runtime.wiring import others_in
from warmgraph_backends.weights.fetching import ModelWeights, RegionWeights
from warmgraph_tools import layouts
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.small_kinds import CAUSAL_WAN

#: Classes that not every host has.
NEWER = (
    "comfy.ldm.wan.model_animate2:WanAnimate2Model",
    "comfy.ldm.qwen_image21.model:QwenImage21Transformer2DModel",
)


@pytest.mark.parametrize("name", registry._BY_ROOT)
def test_every_class_with_a_plan_is_a_module_of_the_host(host: Host, name: str) -> None:
    if name in NEWER:
        pytest.importorskip(name.partition(":")[0], reason="this host is older")
    assert issubclass(import_named(name), torch.nn.Module)


def test_forms_are_known_by_family_and_name() -> None:
    assert all((form.family, form.name) == key for key, form in registry._FORMS.items())
    families = {family for family, _ in registry._FORMS}
    assert {"unet", "control", "adapter"} <= families


def test_a_class_without_a_plan_is_named() -> None:
    text = registry.plan_model(torch.nn.Linear(2, 2))
    assert text == "no region plan for Linear yet: runs at normal speed"


MOTION = """
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock

class MotionModule(torch.nn.Module):
    def forward(self, x):
        return x

class OtherBlock(ResBlock):
    pass

NODE_CLASS_MAPPINGS = {}
"""


def test_a_wan_that_goes_frame_by_frame_is_named(host: Host) -> None:
    model = transformers.make_small(CAUSAL_WAN).diffusion_model
    words = "no region plan for CausalWanModel yet: runs at normal speed"
    assert registry.plan_model(model) == words


def test_a_layer_that_another_pack_added_is_its_own_and_one_in_a_blocks_place_is_named(
    host: Host, install_pack: Callable[[str, dict[str, str]], Path]
) -> None:
    folder = install_pack("Some Motion", {"__init__.py": MOTION})
    module = sys.modules[str(folder)]
    other = module.OtherBlock.__new__(module.OtherBlock)
    plan = Plan()
    unet.plan_layer(plan, "input_blocks.1.2", module.MotionModule())
    unet.plan_layer(plan, "input_blocks.2.1", module.MotionModule())
    unet.plan_layer(plan, "middle_block.0", other)
    assert plan.places == []
    assert plan.outside == [
        ("middle_block.0", "OtherBlock is another node's own class (Some Motion)")
    ]
    assert plan.guests == [
        ("input_blocks.1.2", "MotionModule of Some Motion"),
        ("input_blocks.2.1", "MotionModule of Some Motion"),
    ]


def test_a_twin_has_the_weight_and_bias_that_the_module_lacks(host: Host) -> None:
    from comfy.controlnet import ControlLoraOps

    module = ControlLoraOps.Linear(2, 3, bias=False)
    for name, shape in {"weight": (3, 2), "up": (3, 1), "down": (1, 2)}.items():
        delattr(module, name)
        module.register_parameter(name, torch.nn.Parameter(torch.rand(shape)))
    description = describe_module(
        module, reads=lambda _: ("in_features",), dtype=lambda _m, _n, tensor: tensor.dtype
    )
    twin: Any = make_twin(description, lambda shape, dtype: torch.ones(shape, dtype=dtype))
    assert "bias" not in twin._parameters and twin.bias is None
    assert twin.weight.shape == (3, 2) and twin.up.shape == (3, 1)


def _adapter_block() -> Any:
    from comfy.t2i_adapter.adapter import ResnetBlock

    return ResnetBlock(8, 8, down=True, ksize=1, sk=True, use_conv=False)


def test_a_block_without_some_children_is_looked_at_all_the_same(host: Host) -> None:
    block = _adapter_block()
    assert block.in_conv is None and block.skep is None
    dispatch = dispatch_one(Place("body.0", block, adapter.BLOCK))
    plan = Plan([dispatch])
    assert others_in(plan).places == {}
    block.act.register_forward_hook(lambda *_: None)
    assert others_in(plan).places == {"body.0": "another node hooks a ReLU"}


def test_an_adapters_block_leaves_its_downsampling_to_the_host(host: Host) -> None:
    block, x = _adapter_block(), torch.rand(2, 8, 7, 5)
    place = Place("body.0", block, adapter.BLOCK)

    def call(inner: torch.Tensor) -> torch.Tensor:
        return place.form.reference(block, inner)

    for each in (call, lambda _: None):
        ((module, _, forward),) = dispatch_one(place).forwards([each])  # type: ignore[list-item]
        assert module is block and torch.equal(forward(x), block(x))


def test_weights_of_a_module_without_a_patcher_are_looked_at_once_a_run() -> None:
    weights = ModelWeights(torch.nn.Linear(2, 2), torch.device("cpu"), torch.float32)
    weights.begin_run()
    weights.begin_step()
    epoch = weights.epoch
    weights.begin_step()
    assert weights.epoch == epoch
    weights.begin_run()
    assert weights.epoch > epoch


def test_a_buffer_is_a_weight_that_may_be_replaced() -> None:
    model = torch.nn.Module()
    model.register_buffer("scale", torch.ones(16), persistent=False)
    source = ModelWeights(model, torch.device("cpu"), torch.float32)
    weights = RegionWeights(model, [WeightSpec("scale", (16,), "float32")], source)
    source.begin_run()
    source.begin_step()
    assert weights.fetch().tensors == [model.scale]
    model.scale = torch.full((16,), 2.0)
    source.begin_step()
    [found] = weights.fetch().tensors
    assert torch.equal(found, torch.full((16,), 2.0))


def test_spare_vram_counts_each_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def patcher(model: object, kind: str, left: int) -> Any:
        sizes = {"model_size": lambda: left + 5, "loaded_size": lambda: 5}
        return SimpleNamespace(model=model, load_device=torch.device(kind), **sizes)

    one, two = object(), object()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10 << 30, 80 << 30))
    assert spare_vram([patcher(one, "cpu", 1)]) is None
    models = [patcher(one, "cuda", 1 << 30), patcher(one, "cuda", 1 << 30)]
    assert spare_vram(models) == 7 << 30
    assert spare_vram([*models, patcher(two, "cuda", 3 << 30)]) == 4 << 30


def test_a_model_that_is_built_otherwise_runs_as_without_the_node_in_words(host: Host) -> None:
    import comfy.ops
    from comfy.ldm.flux.model import Flux

    operations = comfy.ops.disable_weight_init
    with torch.device("meta"):
        model = Flux(**layouts.FLUX, operations=operations, dtype=torch.float32)
    assert isinstance(registry.plan_model(model), Plan)
    latent = (1, 16, 8, 8)
    assert registry.empty_inputs(model, {}, latent) is not None
    del model.double_blocks, model.params
    assert registry.plan_model(model) == (
        "this Flux is not built as the host's that is known here (AttributeError: 'Flux' object "
        "has no attribute 'double_blocks'): runs at normal speed"
    )
    assert registry.empty_inputs(model, {}, latent) is None
