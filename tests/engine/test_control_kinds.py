"""Compile ControlNet with what is no plain ControlNet: ControlLoRA, T2I-Adapter, union."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_tools import checkpoints, layouts
from warmgraph_tools.inprocess import Host

from .controlled import Controlled
from .lab import TOLERANCE, Lab, relative

pytestmark = pytest.mark.slow  # fourteen kinds of their own are built


def control_file(host: Host, kind: str, base: str) -> str:
    return checkpoints.ensure(host.base / "models", kind, base=base).name


# --- ControlLoRA: the host makes its network from the model's weights at every run ----------------


@pytest.fixture(scope="module")
def lora(lab: Lab, host: Host) -> Controlled:
    return Controlled(lab, host, "narrowxl", control_file(host, "controllora", "narrowxl"))


def test_a_control_lora_is_compiled_when_it_runs_and_built_once(lab: Lab, lora: Controlled) -> None:
    fresh = lab.controlled(lora.plain)
    report = lora.report(fresh)
    assert report["regions"]["total"] == 0 and report["model"] == "ControlLora"
    assert any("made from the model at every run" in note for note in report["notes"])
    lora.check()
    built = lab.jobs(), lab.builds()
    report = lora.report()
    assert report["regions"]["eager"] == 0 and len(report["kinds"]) > 5, report["eager"]
    lora.check(width=200, height=136, batch=2)
    eager = lora.sample(lora.apply(lora.plain))
    assert relative(lora.sample(lora.apply(fresh)), eager) < TOLERANCE
    assert lora.report(fresh)["regions"]["eager"] == 0
    assert (lab.jobs(), lab.builds()) == built


def test_nothing_of_a_control_loras_network_stays_after_the_run(
    lora: Controlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.cldm.cldm

    made: list[weakref.ref[Any]] = []
    host: Callable[..., None] = comfy.cldm.cldm.ControlNet.__init__

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        host(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(comfy.cldm.cldm.ControlNet, "__init__", remember)
    applied = lora.apply(lora.ours)
    lora.sample(applied)
    assert made and not any(network() for network in made)
    assert lora.report()["regions"]["compiled"] > 10


def test_two_copies_of_a_control_lora_in_one_run(lora: Controlled) -> None:
    def twice(net: Any) -> tuple[Any, Any]:
        return lora.apply(net, lora.apply(net, strength=0.6), strength=0.3)

    lora.check(twice)
    lora.check(twice, steps=1)


def test_a_control_lora_follows_a_lora_on_the_model(lora: Controlled, host: Host) -> None:
    name = host.model_file("lora", base="narrowxl")
    (model,) = host.node(
        "LoraLoaderModelOnly", model=lora.model, lora_name=name, strength_model=1.0
    )
    built = lora.lab.jobs()
    eager = lora.sample(lora.apply(lora.plain), model)
    assert relative(lora.sample(lora.apply(lora.ours), model), eager) < TOLERANCE
    assert lora.lab.jobs() == built


# --- T2I-Adapter ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["narrowt2i15", "narrowt2ixl"])
def test_a_t2i_adapter_at_any_size(lab: Lab, host: Host, kind: str) -> None:
    adapter = Controlled(lab, host, kind, control_file(host, "t2i", kind))
    report = adapter.report()
    assert report["regions"] == {"total": 8, "compiled": 8, "eager": 0}
    assert report["model"] == "T2IAdapter"
    built = lab.jobs()
    adapter.check()
    for width, height in ((64, 64), (200, 136), (104, 248)):
        adapter.check(width=width, height=height, steps=1)
    assert next(adapter.network.parameters()).device.type == "cpu"
    assert lab.jobs() == built


# --- union ----------------------------------------------------------------------------------------


def test_a_union_network_is_cut_as_any_other_and_runs_as_the_hosts(lab: Lab, host: Host) -> None:
    """Its transformer is 320 wide in the host's code: no narrow one exists, and none is built."""
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.ops

    layout = {
        name: value
        for name, value in layouts.UNETS["sd15"].items()
        if name not in ("out_channels", "transformer_depth_output")
    }
    network = comfy.cldm.cldm.ControlNet(
        **layout,
        hint_channels=3,
        dtype=torch.float32,
        device="cpu",
        operations=comfy.ops.disable_weight_init,
        union_controlnet_num_control_type=6,
    )
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    weights = checkpoints.Random(5, shared=False).like(shapes)
    network.load_state_dict({name: value.float() for name, value in weights.items()})
    plain = comfy.controlnet.ControlNet(network.eval(), load_device=torch.device("cpu"))
    ours = lab.controlled(plain, when_missing="never")
    lab.settle()
    report = lab.engine.report(ours)
    assert report["regions"]["total"] == 15
    assert [entry["reason"] for entry in report["eager"]] == ["no compiled graph"]
    name = checkpoints.ensure(host.base / "models", "sd15", name="sd15.ckpt").name
    model, clip, _ = host.nodes.CheckpointLoaderSimple().load_checkpoint(name)
    prompt, image = host.encode(clip, "a cat"), torch.rand(1, 64, 64, 3)
    for kind in ("auto", "depth"):
        latents = []
        for net in (plain, ours):
            (typed,) = host.node("SetUnionControlNetType", control_net=net, type=kind)
            applied = host.control((prompt, prompt), typed, image, strength=0.5)
            latents.append(host.sample(model, *applied, steps=1))
        assert relative(latents[1], latents[0]) < TOLERANCE
