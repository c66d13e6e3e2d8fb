"""Compile ControlNet: a network's own results, and the images under it, stay the host's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..controlled import Controlled, error, load, recorded
from ..lab import TOLERANCE, Lab, relative
from ..subject import reasons

HINT = "Hint block 3->64"
SIZES = [  # pixels of the image
    *[(64, 64), (512, 512), (360, 480), (200, 264), (64, 640), (960, 40)],
    *[(248, 376), (32, 40), (72, 104), (128, 120), (720, 960), (104, 16)],
]
MakeLab = Callable[..., Lab]


@pytest.fixture
def nothing_built(lab: Lab) -> Iterator[None]:
    """What the test does must build nothing."""
    before = lab.jobs(), lab.builds()
    yield
    assert (lab.jobs(), lab.builds()) == before


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
    assert reasons(lab.engine.report(ours)) == {"no compiled graph": 1}
    assert lab.engine.report(ours)["calls"]["compiled"] > 0 and lab.jobs() == 0


def test_both_networks_compiled(xl: Controlled, nothing_built: None) -> None:
    unet = xl.lab.compiled(xl.model)
    eager = xl.sample(xl.apply(xl.plain))
    both = xl.sample(xl.apply(xl.ours), unet)
    assert relative(both, eager) < TOLERANCE
    assert relative(eager, xl.sample((xl.positive, xl.negative))) > 100 * TOLERANCE  # visible


def test_two_networks_in_one_prompt(xl: Controlled, nothing_built: None) -> None:
    other = load(xl.host, "other.safetensors", seed=3)
    ours = xl.lab.controlled(other)
    theirs = xl.apply(other, xl.apply(xl.plain))
    image = xl.sample(xl.apply(ours, xl.apply(xl.ours)))
    assert relative(image, xl.sample(theirs)) < TOLERANCE
    for net in (ours, xl.ours):
        assert xl.report(net)["calls"]["compiled"] > 0


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
