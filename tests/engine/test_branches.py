"""A UNet cut in two: the outer blocks around the feature that the whole one just showed give the
same bits as the whole one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.deepcache.branches import Branch, depth
from warmgraph_tools.inprocess import Host

SIZES = [(8, 8), (9, 15), (21, 14)]
Call = dict[str, Any]


@pytest.fixture(scope="module", params=["narrowxl", "narrow15"])
def unet(request: pytest.FixtureRequest, host: Host) -> Any:
    return host.load(request.param)[0].model.diffusion_model


@pytest.fixture
def branches(unet: Any) -> list[Branch]:
    return [Branch(unet, number) for number in range(depth(unet))]


def _call(unet: Any, size: tuple[int, int], batch: int = 2, **options: Any) -> Call:
    draw = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    width = next(
        m.attn2.to_k.in_features
        for m in unet.modules()
        if type(m).__name__ == "BasicTransformerBlock"
    )
    adm = unet.label_emb[0][0].in_features if unet.num_classes is not None else None
    return {
        "x": random(batch, 4, *size),
        "timesteps": torch.full((batch,), 500.0),
        "context": random(batch, 7, width),
        "y": None if adm is None else random(batch, adm),
        "transformer_options": {"patches": {}, **options},
    }


def _copied(call: Call) -> Call:
    """The same call; the host uses its containers up."""
    control = call.get("control")
    return {
        **call,
        "transformer_options": copy.copy(call["transformer_options"]),
        "control": None if control is None else {side: list(r) for side, r in control.items()},
    }


def _agree(unet: Any, branch: Branch, call: Call) -> torch.Tensor:
    with torch.inference_mode():
        expected = unet._forward(**_copied(call))
        output, feature = branch.full(**_copied(call))
        assert torch.equal(output, expected)
        before = feature.clone()
        for _ in range(2):
            assert torch.equal(branch.shallow(**_copied(call), feature=feature), expected)
        assert torch.equal(feature, before), "the feature may be used again"
    return feature


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_branch_gives_the_same_bits(
    unet: Any, branches: list[Branch], size: tuple[int, int]
) -> None:
    sizes = {_agree(unet, branch, _call(unet, size)).shape[2:] for branch in branches}
    assert size in sizes and len(sizes) > 1, "branches lie at several levels"


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_any_batch(unet: Any, branches: list[Branch], batch: int) -> None:
    _agree(unet, branches[0], _call(unet, (9, 15), batch))


def _residuals(unet: Any, call: Call) -> dict[str, list[Any]]:
    """What a ControlNet gives: one residual for each skip connection, and for the middle."""
    shapes: list[torch.Size] = []
    middle: list[torch.Size] = []

    def note(h: torch.Tensor, options: Any) -> torch.Tensor:
        shapes.append(h.shape)
        return h

    def after(given: dict[str, Any]) -> dict[str, Any]:
        middle.append(given["h"].shape)
        return given

    options = {"patches": {"input_block_patch": [note], "middle_block_after_patch": [after]}}
    with torch.inference_mode():
        unet._forward(**{**_copied(call), "transformer_options": options})
    return {
        "output": [torch.randn(shape) for shape in shapes],
        "middle": [torch.randn(middle[0])],
        "input": [torch.randn(shape) for shape in reversed(shapes)],
    }


def test_residuals_reach_the_blocks_that_they_belong_to(unet: Any, branches: list[Branch]) -> None:
    call = _call(unet, (9, 15))
    control = _residuals(unet, call)
    for sides in (("output", "middle"), ("input",), ("input", "middle", "output")):
        for branch in branches:
            _agree(unet, branch, {**call, "control": {side: control[side] for side in sides}})


def test_a_short_list_of_residuals_serves_the_innermost_blocks_first(
    unet: Any, branches: list[Branch]
) -> None:
    call = _call(unet, (9, 15))
    outputs = _residuals(unet, call)["output"]
    for branch in branches:
        _agree(unet, branch, {**call, "control": {"output": outputs[3:]}})


def _in_place(h: torch.Tensor, skip: torch.Tensor, options: Any) -> tuple[Any, Any]:
    """As FreeU: scales part of the hidden state where it lies, by the block's number."""
    h[:, ::2] *= 1.0 + 0.1 * options["block"][1]
    return h, skip * 0.9


def _after_middle(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "h": given["h"] * 1.5 + 0.1}


@pytest.mark.parametrize(
    "patches",
    [
        {"output_block_patch": [_in_place]},
        {"middle_block_after_patch": [_after_middle]},
        {"input_block_patch": [lambda h, options: h * (1 + options["block"][1])]},
        {"input_block_patch_after_skip": [lambda h, options: h * 0.5]},
        {"emb_patch": [lambda emb, channels, options: emb * 1.1]},
    ],
    ids=lambda patches: next(iter(patches)),
)
def test_patches_of_the_blocks_that_run_act_and_others_are_in_the_feature(
    unet: Any, branches: list[Branch], patches: dict[str, list[Callable[..., Any]]]
) -> None:
    for branch in branches:
        _agree(unet, branch, _call(unet, (9, 15), patches=patches))


def test_blocks_and_transformers_keep_their_numbers(unet: Any, branches: list[Branch]) -> None:
    def seen(run: Callable[..., Any], *args: Any) -> list[tuple[Any, int, int]]:
        places: list[tuple[Any, int, int]] = []

        def patch(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any, Any]:
            where = (options["block"], options["transformer_index"], options["block_index"])
            places.append(where)
            return q, k, v

        call = _call(unet, (8, 8), patches={"attn1_patch": [patch]})
        with torch.inference_mode():
            run(*args, **_copied(call))
        return places

    whole = seen(unet._forward)
    with torch.inference_mode():
        for branch in branches:
            _, feature = branch.full(**_copied(_call(unet, (8, 8))))
            outer = seen(functools.partial(branch.shallow, feature=feature))
            first, last = len(unet.input_blocks), len(unet.output_blocks)
            kept = branch.number + 1
            assert outer == [
                place
                for place in whole
                if (place[0][0] == "input" and place[0][1] < kept and kept <= first)
                or (place[0][0] == "output" and place[0][1] >= last - kept)
            ]


def test_the_hosts_model_is_not_touched(unet: Any) -> None:
    before = list(unet.named_modules())
    kept = dict(unet.__dict__)
    branch = Branch(unet, 1)
    _agree(unet, branch, _call(unet, (8, 8)))
    assert list(unet.named_modules()) == before and unet.__dict__ == kept
    assert branch._tap.feature is None and branch._source.feature is None


def test_an_error_in_the_middle_leaves_nothing_behind(unet: Any) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("on purpose")

    branch = Branch(unet, 0)
    good = _call(unet, (8, 8))
    bad = _call(unet, (8, 8), patches={"output_block_patch": [fails]})
    with torch.inference_mode():
        _, feature = branch.full(**_copied(good))
        for run in (branch.full, lambda **call: branch.shallow(**call, feature=feature)):
            with pytest.raises(RuntimeError, match="on purpose"):
                run(**_copied(bad))
    assert branch._tap.feature is None and branch._source.feature is None
    _agree(unet, branch, good)


def test_a_branch_that_the_unet_lacks_is_refused(unet: Any) -> None:
    for number in (-1, depth(unet)):
        with pytest.raises(ValueError, match=f"0 to {depth(unet) - 1}"):
            Branch(unet, number)
