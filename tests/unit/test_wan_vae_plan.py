"""Wan's plan: a norm's region does the work of the SiLU after it, and only where it ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends.families import wan_vae as wan
from warmgraph_backends.kinds.layout import CHANNELS_LAST, is_laid_out, lay_out
from warmgraph_backends.plans.plan import Dispatch, Place, Plan
from warmgraph_backends.plans.specs import describe_place
from warmgraph_tools.inprocess import Host


@pytest.fixture
def block(host: Host) -> Any:
    from comfy.ldm.wan.vae import ResidualBlock

    block = ResidualBlock(8, 8).requires_grad_(False)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    return block


def dispatches(block: Any) -> list[Dispatch]:
    return list(wan._pairs("residual", block.residual, type(block.residual[0])))


def install(dispatch: Dispatch, call: Any) -> None:
    for module, _, forward in dispatch.forwards([call]):
        module.__dict__["forward"] = forward


def test_each_norm_is_paired_with_the_silu_after_it(block: Any) -> None:
    pairs = dispatches(block)
    assert [d.regions[0].name for d in pairs] == ["residual.0", "residual.3"]
    assert [d.follower.module for d in pairs] == [block.residual[1], block.residual[4]]  # type: ignore[union-attr]


def test_a_silu_runs_where_its_norms_region_did_not(block: Any) -> None:
    x = torch.randn(1, 8, 2, 3, 4)
    expected = block(x)
    for pattern in ((True, True), (True, False), (False, True), (False, False)):
        for dispatch, serves in zip(dispatches(block), pattern, strict=True):
            form, module = dispatch.regions[0].form, dispatch.module
            install(
                dispatch,
                (lambda t, f=form, m=module: f.reference(m, t)) if serves else lambda _: None,
            )
        torch.testing.assert_close(block(x), expected)


def test_what_comes_between_a_norm_and_its_silu_has_no_say(block: Any) -> None:
    first, second = dispatches(block)
    install(first, lambda t: first.regions[0].form.reference(first.module, t))
    install(second, lambda t: second.regions[0].form.reference(second.module, t))
    one, two = torch.randn(2, 1, 8, 2, 3, 4).unbind()
    _, act, _, norm, other, _, _ = block.residual
    interrupted = first.module(one)  # and an exception keeps the SiLU from being called
    later = first.module(two)
    done = later.clone()
    torch.testing.assert_close(act(two), torch.nn.functional.silu(two))
    assert act(later) is later  # in another thread's turn
    torch.testing.assert_close(act(later), torch.nn.functional.silu(done))  # once
    torch.testing.assert_close(other(interrupted), torch.nn.functional.silu(interrupted))
    assert other(norm(one)) is not None


def test_a_norm_is_described_in_the_dtype_that_the_host_will_cast_it_to(block: Any) -> None:
    """Under dynamic VRAM the file's tensor is there first, whatever its dtype."""
    norm = block.residual[0]
    norm.gamma_comfy_model_dtype = torch.bfloat16
    place = Place("norm", norm, wan.FORMS["norm_silu"])
    description = describe_place(
        place, Plan(symbols=wan.SYMBOLS), dtype=torch.bfloat16, device="cuda"
    )
    assert norm.gamma.dtype is torch.float32
    assert description.module["parameters"]["gamma"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "shape", [(2, 8, 3, 4, 5), (1, 8, 1, 4, 5), (1, 8, 2, 1, 1), (1, 1, 2, 3, 4)]
)
def test_videos_are_laid_out_with_their_channels_last(shape: tuple[int, ...]) -> None:
    _, channels, frames, height, width = shape
    x = torch.randn(shape)
    laid_out = lay_out(x, CHANNELS_LAST)
    row = width * channels
    assert laid_out.stride() == (frames * height * row, 1, height * row, row, channels)
    assert torch.equal(laid_out, x) and is_laid_out(laid_out, CHANNELS_LAST)
    assert lay_out(laid_out, CHANNELS_LAST) is laid_out
