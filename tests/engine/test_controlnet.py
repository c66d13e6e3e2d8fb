"""Compile ControlNet: a network's own results, and the images under it, stay the host's."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from warmgraph_tools import checkpoints
from warmgraph_tools.inprocess import Host

from .controlled import Controlled, error, recorded
from .lab import TOLERANCE, Lab, left_behind, relative
from .subject import reasons

HINT = "Hint block 3->64"
HUNG = {"get_control", "copy_to", "pre_run", "cleanup", "__reduce_ex__"}
SIZES = [  # pixels of the image
    *[(64, 64), (512, 512), (360, 480), (200, 264), (64, 640), (960, 40)],
    *[(248, 376), (32, 40), (72, 104), (128, 120), (720, 960), (104, 16)],
]
MakeLab = Callable[..., Lab]


@pytest.fixture(scope="module")
def xl(lab: Lab, host: Host) -> Controlled:
    return Controlled(lab, host)


@pytest.fixture
def nothing_built(lab: Lab) -> Iterator[None]:
    """What the test does must build nothing."""
    before = lab.jobs(), lab.builds()
    yield
    assert (lab.jobs(), lab.builds()) == before


def load(host: Host, name: str, base: str = "narrowxl", seed: int = 0) -> Any:
    """A control network from a file of its own name."""
    checkpoints.ensure(host.base / "models", "controlnet", base=base, seed=seed, name=name)
    return host.node("ControlNetLoader", control_net_name=name)[0]


def is_ours(control: Any) -> bool:
    return vars(control).keys() >= HUNG


def is_plain(control: Any) -> bool:
    return not HUNG & vars(control).keys()


# --- graphs ---------------------------------------------------------------------------------------


def test_behind_its_unet_a_control_network_has_one_graph_of_its_own(
    lab: Lab, xl: Controlled
) -> None:
    unet = {kind["key"] for kind in lab.engine.report(lab.compiled(xl.model))["kinds"]}
    report = xl.report()
    own = [kind["kind"] for kind in report["kinds"] if kind["key"] not in unet]
    assert own == [HINT] and len(report["kinds"]) > 5
    assert report["regions"]["eager"] == 0 and report["model"] == "ControlNet"
    assert report["id"].startswith("controlnet-")
    xl.check()


@pytest.mark.parametrize(
    ("width", "height"),
    [pytest.param(*size, marks=pytest.mark.slow if i % 2 else []) for i, size in enumerate(SIZES)],
)
def test_any_size(xl: Controlled, nothing_built: None, width: int, height: int) -> None:
    xl.check(width=width, height=height, steps=1, cfg=1.0 if width > 200 else 7.0)


def test_one_pixel_of_latent(xl: Controlled, nothing_built: None) -> None:
    """Its norms are over two numbers and amplify rounding, so only the image is compared."""
    eager, image = (
        xl.sample(xl.apply(net), width=8, height=8, steps=1) for net in (xl.plain, xl.ours)
    )
    assert relative(image, eager) < TOLERANCE


@pytest.mark.parametrize(("batch", "cfg"), [(2, 7.0), (3, 1.0)])
def test_any_batch(xl: Controlled, nothing_built: None, batch: int, cfg: float) -> None:
    xl.check(batch=batch, cfg=cfg, steps=1)


def test_prompts_of_unequal_length(xl: Controlled, nothing_built: None) -> None:
    long = xl.host.encode(xl.clip, " ".join(["cat"] * 140))
    assert long[0][0].shape[1] == 154
    xl.check(lambda net: xl.apply(net, (long, xl.negative)))


def test_after_a_restart_all_graphs_are_loaded_and_none_is_built(
    xl: Controlled, make_lab: MakeLab
) -> None:
    lab = make_lab()
    again = Controlled(lab, xl.host)
    assert lab.counts(again.ours) == (0, len(again.report()["kinds"]), 0)
    again.check()
    assert lab.jobs() == 0


def test_another_file_of_the_architecture_builds_nothing(
    xl: Controlled, nothing_built: None
) -> None:
    other = load(xl.host, "other.safetensors", seed=3)
    theirs = xl.sample(xl.apply(other))
    assert relative(theirs, xl.sample(xl.apply(xl.plain))) > 100 * TOLERANCE
    assert relative(xl.sample(xl.apply(xl.lab.controlled(other))), theirs) < TOLERANCE


def test_while_nothing_is_ready_the_image_is_eagers_and_then_graphs_come(
    xl: Controlled, make_lab: MakeLab
) -> None:
    lab = make_lab()
    with lab.held():
        ours = lab.controlled(xl.plain, when_missing="background")
        eager = xl.sample(xl.apply(xl.plain))
        assert torch.equal(xl.sample(xl.apply(ours)), eager)
        assert list(reasons(lab.engine.report(ours))) == ["it is being loaded"]
    lab.settle()
    image = xl.sample(xl.apply(ours))
    assert relative(image, eager) < TOLERANCE and not torch.equal(image, eager)
    assert lab.engine.report(ours)["regions"]["eager"] == 0


def test_never_runs_what_is_there_and_names_what_is_not(xl: Controlled, make_lab: MakeLab) -> None:
    lab = make_lab(without=(HINT,))
    ours = lab.controlled(xl.plain, when_missing="never")
    lab.settle()
    image = xl.sample(xl.apply(ours))
    assert relative(image, xl.sample(xl.apply(xl.plain))) < TOLERANCE
    assert reasons(lab.engine.report(ours)) == {"no compiled file": 1}
    assert lab.engine.report(ours)["calls"]["compiled"] > 0 and lab.jobs() == 0


def test_both_networks_compiled(xl: Controlled, nothing_built: None) -> None:
    unet = xl.lab.compiled(xl.model)
    eager = xl.sample(xl.apply(xl.plain))
    both = xl.sample(xl.apply(xl.ours), unet)
    assert relative(both, eager) < TOLERANCE
    assert relative(eager, xl.sample((xl.positive, xl.negative))) > 100 * TOLERANCE  # visible


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


def test_two_networks_in_one_prompt(xl: Controlled, nothing_built: None) -> None:
    other = load(xl.host, "other.safetensors", seed=3)
    ours = xl.lab.controlled(other)
    theirs = xl.apply(other, xl.apply(xl.plain))
    image = xl.sample(xl.apply(ours, xl.apply(xl.ours)))
    assert relative(image, xl.sample(theirs)) < TOLERANCE
    for net in (ours, xl.ours):
        assert xl.report(net)["calls"]["compiled"] > 0


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


# --- what Apply ControlNet can say ----------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.4, 1.0, 2.5])
def test_strengths(xl: Controlled, strength: float) -> None:
    xl.check(lambda net: xl.apply(net, strength=strength))


def test_strength_0_is_no_control(xl: Controlled) -> None:
    applied = xl.apply(xl.ours, strength=0.0)
    assert torch.equal(xl.sample(applied), xl.sample((xl.positive, xl.negative)))


@pytest.mark.parametrize("ends", [(0.0, 0.4), (0.3, 1.0), (0.4, 0.6)])
def test_a_range_of_steps(xl: Controlled, ends: tuple[float, float]) -> None:
    xl.check(lambda net: xl.apply(net, start_percent=ends[0], end_percent=ends[1]), steps=5)


def test_a_range_without_a_step(xl: Controlled) -> None:
    before = xl.report()["calls"]
    image = xl.sample(xl.apply(xl.ours, start_percent=0.98, end_percent=0.99))
    assert torch.equal(image, xl.sample((xl.positive, xl.negative)))
    assert xl.report()["calls"] == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 1)])
def test_chains_of_plain_and_compiled(xl: Controlled, order: tuple[int, int]) -> None:
    """A plain copy under ours shares its module and must not meet our forwards."""

    def chain(nets: list[Any]) -> tuple[Any, Any]:
        inner = xl.apply(nets[0], strength=0.7)
        return xl.apply(nets[1], inner, strength=0.5, end_percent=0.6)

    nets = [(xl.plain, xl.ours)[which] for which in order]
    with recorded() as merges:
        image = xl.sample(chain(nets), steps=1)
    with recorded() as theirs:
        eager = xl.sample(chain([xl.plain, xl.plain]), steps=1)
    assert relative(image, eager) < TOLERANCE
    assert len(merges) == len(theirs) == 2
    for which, ours, plain in zip(order, merges, theirs, strict=True):
        assert error(ours, plain) < TOLERANCE
        assert (error(ours, plain) == 0.0) is (which == 0)


def test_area_and_mask(xl: Controlled, nothing_built: None) -> None:
    mask = torch.zeros(1, 72, 104)
    mask[:, :40, 30:] = 1.0

    def area(net: Any) -> tuple[Any, Any]:
        positive, negative = xl.apply(net)
        (part,) = xl.host.node(
            "ConditioningSetArea",
            conditioning=positive,
            width=56,
            height=40,
            x=16,
            y=24,
            strength=1.0,
        )
        return xl.host.node("ConditioningCombine", conditioning_1=xl.positive, conditioning_2=part)[
            0
        ], negative

    def masked(net: Any) -> tuple[Any, Any]:
        positive, negative = xl.apply(net)
        (positive,) = xl.host.node(
            "ConditioningSetMask",
            conditioning=positive,
            mask=mask,
            strength=0.9,
            set_cond_area="default",
        )
        return positive, negative

    xl.check(area)
    xl.check(masked)


@pytest.mark.parametrize("shape", [(1, 64, 64), (1, 301, 217), (2, 72, 104), (1, 16, 512)])
def test_hints_of_other_sizes_and_batches(
    xl: Controlled, nothing_built: None, shape: tuple[int, int, int]
) -> None:
    hint = torch.rand(*shape, 3, generator=torch.Generator().manual_seed(5))
    xl.check(lambda net: xl.apply(net, image=hint), batch=shape[0])


def test_global_average_pooling(xl: Controlled, nothing_built: None) -> None:
    net = load(xl.host, "reference_shuffle.safetensors")
    assert net.global_average_pooling
    ours = xl.lab.controlled(net)
    eager = xl.sample(xl.apply(net))
    assert relative(xl.sample(xl.apply(ours)), eager) < TOLERANCE
    assert relative(eager, xl.sample(xl.apply(xl.plain))) > 100 * TOLERANCE


def test_the_old_apply_node_makes_a_copy_for_each_prompt(xl: Controlled) -> None:
    def old(net: Any) -> tuple[Any, Any]:
        both = [
            xl.host.node(
                "ControlNetApply",
                conditioning=conditioning,
                control_net=net,
                image=xl.image,
                strength=0.6,
            )[0]
            for conditioning in (xl.positive, xl.negative)
        ]
        return both[0], both[1]

    xl.check(old)


def test_what_was_applied_before_the_node_runs_as_without_it(xl: Controlled) -> None:
    applied = xl.apply(xl.plain)
    image = xl.sample(applied)
    xl.lab.controlled(xl.plain)
    assert torch.equal(xl.sample(applied), image)


def test_a_lora_on_the_model(xl: Controlled, nothing_built: None) -> None:
    name = xl.host.model_file("lora", base="narrowxl")
    (model,) = xl.host.node(
        "LoraLoaderModelOnly", model=xl.model, lora_name=name, strength_model=1.0
    )
    eager = xl.sample(xl.apply(xl.plain), model)
    assert relative(xl.sample(xl.apply(xl.ours), model), eager) < TOLERANCE


@pytest.mark.slow  # its kinds are not the UNet's
def test_weights_stored_in_another_dtype(xl: Controlled) -> None:
    """The host casts them call by call."""
    import comfy.controlnet

    path = xl.host.folder_paths.get_full_path("controlnet", "controlnet-narrowxl.safetensors")
    net = comfy.controlnet.load_controlnet(path, model_options={"dtype": torch.bfloat16})
    assert net.control_model.dtype is torch.bfloat16 and net.manual_cast_dtype is torch.float32
    ours = xl.lab.controlled(net)
    eager = xl.sample(xl.apply(net))
    assert relative(xl.sample(xl.apply(ours)), eager) < TOLERANCE
    report = xl.report(ours)
    assert report["regions"]["eager"] == 0 and report["calls"]["compiled"] > 0


# --- residuals ------------------------------------------------------------------------------------


class _Count(TorchDispatchMode):
    """Counts the operators that copy or write."""

    def __init__(self, into: Counter[str]) -> None:
        super().__init__()
        self._into = into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("clone", "copy_", "_to_copy", "add_", "contiguous"):
            self._into[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("unet", ["eager", "ours"])
@pytest.mark.parametrize("control", ["plain", "ours"])
def test_residuals_are_added_in_place_and_never_copied(
    xl: Controlled, unet: str, control: str
) -> None:
    from comfy.patcher_extension import WrappersMP

    model = xl.model if unet == "eager" else xl.lab.compiled(xl.model)
    under_control = xl.apply(xl.plain if control == "plain" else xl.ours)

    def operators(conditions: tuple[Any, Any]) -> Counter[str]:
        found: Counter[str] = Counter()

        def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
            with _Count(found):
                return executor(*args, **kwargs)

        counted = model.clone()
        counted.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "count", around)
        xl.sample(conditions, counted, steps=1)
        return found

    xl.sample(under_control, model, steps=1)  # first-use comparisons are over
    residuals = len(xl.network.zero_convs) + 1
    added = operators(under_control)
    added.subtract(operators((xl.positive, xl.negative)))
    assert +added == Counter({"add_": residuals}) and -added == Counter()


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
    before = xl.report(ours)["calls"]["compiled"]
    for each in (net, ours):
        each.control_model = replaced
    assert torch.equal(xl.sample(xl.apply(ours)), xl.sample(xl.apply(net)))
    report = xl.report(ours)
    assert report["calls"]["compiled"] == before and report["calls"]["eager"] > 0
    assert any("another copy of the network runs" in note for note in report["notes"])


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
