"""The control that Compile ControlNet gives is the host's own object, or the one that came in."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch

from ..controlled import Controlled, load
from ..lab import TOLERANCE, left_behind, relative
from ..subject import reasons

HUNG = {"get_control", "copy_to", "pre_run", "cleanup", "__reduce_ex__"}


def is_ours(control: Any) -> bool:
    return vars(control).keys() >= HUNG


def is_plain(control: Any) -> bool:
    return not HUNG & vars(control).keys()


# --- the object -----------------------------------------------------------------------------------


def test_the_object_that_came_in_is_unchanged_and_bit_identical(xl: Controlled) -> None:
    def state() -> Any:
        modules = [(n, type(m), sorted(m.__dict__)) for n, m in xl.network.named_modules()]
        return sorted(vars(xl.plain)), modules

    image, before = xl.sample(xl.apply(xl.plain)), state()
    ours = xl.lab.controlled(xl.plain)
    assert ours is not xl.plain and type(ours) is type(xl.plain)
    assert ours.control_model is xl.network
    assert ours.get_models() == xl.plain.get_models()  # shared: the weights are loaded once
    compiled = xl.sample(xl.apply(ours))
    assert not torch.equal(compiled, image)
    assert torch.equal(xl.sample(xl.apply(xl.plain)), image)
    assert torch.equal(xl.sample(xl.apply(ours)), compiled)
    assert state() == before and is_plain(xl.plain)
    assert ours.control_model is xl.network


def test_the_hosts_copies_are_ours_and_other_copies_are_plain(xl: Controlled) -> None:
    (typed,) = xl.host.node("SetUnionControlNetType", control_net=xl.ours, type="auto")
    assert is_ours(typed) and is_ours(xl.ours.copy().copy())
    xl.check(lambda net: xl.apply(net.copy().copy()))
    for made in (copy.copy(xl.ours), copy.deepcopy(xl.ours), copy.deepcopy(xl.ours.copy())):
        assert is_plain(made) and type(made) is type(xl.plain)
        assert torch.equal(xl.sample(xl.apply(made)), xl.sample(xl.apply(xl.plain)))
    assert copy.deepcopy(xl.ours).control_model is not xl.network


def test_one_network_through_two_nodes_and_a_node_behind_a_node(xl: Controlled) -> None:
    first, second = xl.lab.controlled(xl.plain), xl.lab.controlled(xl.plain)
    behind = xl.lab.controlled(first)
    ids = [xl.report(net)["id"] for net in (first, second, behind)]
    assert len(set(ids)) == 3
    images = [xl.sample(xl.apply(net)) for net in (first, second, behind)]
    assert torch.equal(images[0], images[1]) and torch.equal(images[0], images[2])
    eager = xl.lab.controlled(behind, backend="eager")
    assert is_plain(eager)
    assert xl.report(eager)["notes"] == ["the compiler is off, to compare"]
    assert torch.equal(xl.sample(xl.apply(eager)), xl.sample(xl.apply(xl.plain)))


def test_nothing_of_a_dropped_control_stays(xl: Controlled) -> None:
    net = load(xl.host, "dropped.safetensors")
    ours = xl.lab.controlled(net)
    xl.sample(xl.apply(ours))
    xl.host.unload()
    gone, network = weakref.ref(ours), weakref.ref(net.control_model)
    identifier = xl.report(ours)["id"]
    del ours
    assert gone() is None  # by its count of references: a collector may run late
    del net
    xl.lab.settle()
    assert network() is None
    known = {report["id"] for report in xl.lab.engine.overview.snapshot()["models"]}
    assert identifier not in known


# --- others ---------------------------------------------------------------------------------------


class StopError(Exception):
    """What stops a network."""


def test_an_exception_in_the_network_leaves_nothing_and_the_next_run_is_right(
    xl: Controlled,
) -> None:
    def stop(*_args: Any) -> None:
        raise StopError

    image = xl.check()
    applied = xl.apply(xl.ours)
    for _ in range(2):
        handle = xl.network.middle_block.register_forward_pre_hook(stop)
        with pytest.raises(StopError):
            xl.sample(applied)
        handle.remove()
        assert left_behind(xl.network) == []
        assert applied[0][0][1]["control"].control_model is xl.network
        assert xl.lab.engine._prompts.sampling == 0
        assert torch.equal(xl.sample(applied), image)
    assert torch.equal(xl.check(), image)


def test_after_cancel_workers_are_not_held_back_for_long(
    xl: Controlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's Cancel skips the control's `cleanup`."""
    import comfy.model_management as management

    def cancel(*_args: Any) -> None:
        management.interrupt_current_processing(True)

    applied = xl.apply(xl.ours)
    handle = xl.network.middle_block.register_forward_pre_hook(cancel)
    try:
        with pytest.raises(management.InterruptProcessingException):
            xl.sample(applied, steps=4)
    finally:
        handle.remove()
        management.interrupt_current_processing(False)
    engine = xl.lab.engine
    assert engine._prompts.sampling == 0 and left_behind(xl.network) == []
    monkeypatch.setattr(engine._prompts, "until", 0.0)  # as a quarter of a minute later
    assert not engine._prompts.is_busy()
    xl.check()


def test_a_network_that_another_node_hooks_or_patches_is_right_and_named(xl: Controlled) -> None:
    net = load(xl.host, "hooked.safetensors")
    ours = xl.lab.controlled(net)
    block = net.control_model.input_blocks[1][0]
    handle = block.register_forward_hook(lambda _module, _inputs, output: output * 0.5)
    try:
        eager = xl.sample(xl.apply(net))
        assert relative(xl.sample(xl.apply(ours)), eager) < TOLERANCE
        assert reasons(xl.report(ours)) == {}, "a hook runs around the block's own forward"
    finally:
        handle.remove()
    host = type(net.control_model).forward
    net.control_model.forward = lambda **named: host(net.control_model, **named)
    eager = xl.sample(xl.apply(net))
    assert relative(xl.sample(xl.apply(ours)), eager) < TOLERANCE
    assert xl.report(ours)["regions"]["eager"] == 0
    del net.control_model.forward
    replaced = copy.deepcopy(net.control_model)
    before = xl.report(ours)["calls"]
    for each in (net, ours):
        each.control_model = replaced
    assert relative(xl.sample(xl.apply(ours)), xl.sample(xl.apply(net))) < TOLERANCE
    report = xl.report(ours)
    assert report["calls"]["compiled"] > before["compiled"], "a copy is served as the first one is"
    assert report["calls"]["eager"] == before["eager"] and report["regions"]["eager"] == 0


def test_another_packs_subclass_comes_back_itself_and_is_named(xl: Controlled) -> None:
    import comfy.controlnet

    class Advanced(comfy.controlnet.ControlNet):
        """As packs define them."""

    advanced = Advanced(xl.network, load_device=xl.plain.load_device)
    state = dict(vars(advanced))
    assert xl.lab.controlled(advanced) is advanced and vars(advanced) == state
    (note,) = xl.report(advanced)["notes"]
    assert "Advanced of" in note and "is not the host's" in note
    Advanced.__module__ = "/srv/a.b/custom_nodes/advanced-control.nodes"  # as the host names them
    xl.lab.controlled(advanced)
    (note,) = xl.report(advanced)["notes"]
    assert note.startswith("Advanced of advanced-control is not the host's")
    ours = xl.lab.controlled(xl.plain)
    taken = Advanced(xl.network, load_device=ours.load_device)
    taken.control_model_wrapped = ours.control_model_wrapped
    ours.copy_to(taken)
    assert is_plain(taken)
    assert any("took this ControlNet over" in note for note in xl.report(ours)["notes"])
    assert is_ours(ours) and ours.control_model is xl.network


def test_a_control_that_another_node_patched_comes_back_itself(xl: Controlled) -> None:
    patched = xl.plain.copy()
    patched.get_control = patched.get_control  # as a pack that wraps it
    assert xl.lab.controlled(patched) is patched
    assert "another node replaces get_control" in xl.report(patched)["notes"][0]


def test_other_architectures_come_back_themselves_and_are_named(xl: Controlled) -> None:
    import comfy.controlnet
    import comfy.ops
    from comfy.ldm.hydit.controlnet import HunYuanControlNet

    operations = comfy.ops.disable_weight_init
    network = HunYuanControlNet(depth=2, operations=operations, device="cpu", dtype=torch.float32)
    control = comfy.controlnet.ControlNet(network, load_device=torch.device("cpu"))
    assert xl.lab.controlled(control) is control and is_plain(control)
    (note,) = xl.report(control)["notes"]
    assert note == "no region plan for HunYuanControlNet yet: runs at normal speed"


@pytest.mark.parametrize("thing", [None, "a control", 3])
def test_what_is_no_control_is_refused_in_words(xl: Controlled, thing: Any) -> None:
    with pytest.raises(TypeError, match="control_net must be a ControlNet of the host, got a"):
        xl.lab.controlled(thing)


def test_a_control_without_a_network_comes_back_itself(xl: Controlled) -> None:
    empty = xl.plain.copy()
    del empty.control_model
    assert xl.lab.controlled(empty) is empty
    assert "no network" in xl.report(empty)["notes"][0]
