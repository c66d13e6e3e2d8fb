"""DeepCache under ControlNets, T2I-Adapters and GLIGEN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .cached import CALLS, STEPS, Pair, cached, evaluations
from .sampling import step_of

SLOW = pytest.mark.slow
#: Models whose levels are wide enough for an adapter's features.
ADAPTERS = ("narrowt2i15", "narrowt2ixl")


def _controlled(pair: Pair, *nets: tuple[Any, dict[str, Any]]) -> dict[str, Any]:
    """Both prompts under a chain of controls."""
    image = torch.rand(1, 72, 104, 3, generator=torch.Generator().manual_seed(0))
    conditioning = (pair.positive, pair.negative)
    for net, options in nets:
        conditioning = pair.host.control(conditioning, net, image, **options)
    size = {"width": 104, "height": 72}
    return {"positive": conditioning[0], "negative": conditioning[1], **size}


def _net(pair: Pair, kind: str, *, file: str = "controlnet") -> Any:
    name = pair.host.model_file(file, base=kind)
    return pair.node("ControlNetLoader", control_net_name=name)


@pytest.mark.parametrize(
    ("kind", "branch"),
    [("narrow15", 1), ("narrowxl", 4), pytest.param("narrowxl", 0, marks=pytest.mark.slow)],
)
def test_control_reaches_its_own_blocks(pairs: dict[str, Pair], kind: str, branch: int) -> None:
    """At branch 4 the middle block's residual would fit the feature, too, which has it already."""
    pair = pairs[kind]
    net = _net(pair, kind)
    plain = pair.sample(pair.model, width=104, height=72)
    for options in ({}, {"strength": 0.3}):
        sampling = _controlled(pair, (net, options))
        assert not torch.equal(pair.sample(pair.model, **sampling), plain)
        assert pair.check(branch=branch, **sampling) == CALLS


def test_two_controls(xl: Pair) -> None:
    net = _net(xl, "narrowxl")
    sampling = _controlled(xl, (net, {"strength": 0.5}), (net, {"strength": 0.2}))
    assert xl.check(branch=1, **sampling) == CALLS


@pytest.mark.parametrize(
    ("start", "end"),
    [
        pytest.param(0.3, 1.0, id="late", marks=pytest.mark.slow),
        pytest.param(0.0, 0.6, id="early", marks=pytest.mark.slow),
        pytest.param(0.3, 0.7, id="between"),
    ],
)
def test_control_that_comes_or_goes_in_the_run_takes_full_calls(
    xl: Pair, start: float, end: float
) -> None:
    sampling = _controlled(xl, (_net(xl, "narrowxl"), {"start_percent": start, "end_percent": end}))
    edges = {step_of(xl, part, 12) for part in (start, end) if 0 < part < 1}
    assert not edges & {0, 5, 10}
    counts = xl.check(
        branch=1, steps=12, full={0, 5, 10} | edges, options={"interval": 5}, **sampling
    )
    assert counts["full"] == 3 + len(edges)


def test_control_that_changes_its_strength_acts_in_the_outer_blocks_at_once(xl: Pair) -> None:
    """Of the same blocks' residuals nothing tells apart: in the deep ones the change is felt with
    the next full step.
    """
    net = _net(xl, "narrowxl")
    sampling = _controlled(
        xl,
        (net, {"strength": 1.0, "end_percent": 0.5}),
        (net, {"strength": 0.2, "start_percent": 0.5}),
    )
    assert xl.check(steps=10, full={0, 4, 8}, options={"interval": 4}, **sampling)["full"] == 3


@pytest.mark.parametrize(
    ("branch", "kind"),
    [
        pytest.param(branch, kind, marks=[] if (branch, kind) == (2, ADAPTERS[1]) else SLOW)
        for branch in (0, 2)
        for kind in ADAPTERS
    ],
)
def test_a_t2i_adapter(pairs: dict[str, Pair], kind: str, branch: int) -> None:
    pair = pairs[kind]
    sampling = _controlled(pair, (_net(pair, kind, file="t2i"), {}))
    bare = {name: sampling[name] for name in ("width", "height")}
    assert not torch.equal(pair.sample(pair.model, **sampling), pair.sample(pair.model, **bare))
    assert pair.check(branch=branch, **sampling) == CALLS


def test_gligen_runs_whole_at_every_step(xl: Pair) -> None:
    """The host makes its patch anew for each evaluation: what it does then nobody can tell."""
    import comfy.gligen

    draw = torch.Generator().manual_seed(2)
    parts = {
        f"{name}.fuser": comfy.gligen.GatedSelfAttentionDense(64, 64, 1, 64)
        for name, module in xl.unet.named_modules()
        if type(module).__name__ == "BasicTransformerBlock"
    }
    weights = {
        f"{name}.{key}": torch.randn(value.shape, generator=draw) / 8
        for name, part in {**parts, "position_net": comfy.gligen.PositionNet(64, 64)}.items()
        for key, value in part.state_dict().items()
    }
    folder = Path(xl.host.folder_paths.get_folder_paths("gligen")[0])
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(weights, folder / "outer.pt")
    positive = xl.node(
        "GLIGENTextBoxApply",
        conditioning_to=xl.positive,
        clip=xl.clip,
        gligen_textbox_model=xl.node("GLIGENLoader", gligen_name="outer.pt"),
        text="a dog",
        width=32,
        height=32,
        x=16,
        y=16,
    )
    plain = xl.sample(xl.model, positive=positive)
    assert not torch.equal(plain, xl.sample(xl.model))
    ours = cached(xl.model, branch=3)
    assert torch.equal(xl.sample(ours, positive=positive), plain)
    counts = evaluations(ours)
    assert counts["full"] > STEPS and counts["shallow"] <= 4, "the other conditioning is as ever"
