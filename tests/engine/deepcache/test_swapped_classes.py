"""DeepCache on a model in which another node swaps the classes of modules in place."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .cached import CALLS, Pair, cache_of, cached, evaluations


@pytest.fixture(scope="module")
def tuned(host: Host) -> ModuleType:
    from . import tuned

    return tuned


def _classes(unet: Any) -> list[type]:
    return [type(module) for module in unet.modules()]


@pytest.mark.parametrize("branch", [0, 2])
def test_a_swapped_unet_is_left_to_its_owner_in_words(xl: Pair, tuned: Any, branch: int) -> None:
    before = cached(xl.model, branch=branch)
    models = {
        "over": cached(tuned.swapped(xl.model), branch=branch),
        "under": tuned.swapped(before),
    }
    try:
        expected = xl.sample(tuned.swapped(xl.model))
        assert type(xl.unet) is tuned.TunedUNet, (
            "the host leaves the classes in until the next load"
        )
        models["made while it is loaded"] = cached(tuned.swapped(xl.model), branch=branch)
        plain_while_loaded = cached(xl.model, branch=branch)
        for name, model in models.items():
            assert torch.equal(xl.sample(model), expected), name
            problem = cache_of(model).problem
            assert problem is not None and "TunedUNet" in problem and "not used" in problem
        plain = xl.sample(cached(xl.model, branch=branch))
        assert not torch.equal(plain, expected)
        for model in (before, plain_while_loaded):  # of the very model, without the swap
            assert torch.equal(xl.sample(model), plain)
            assert evaluations(model)["shallow"] == CALLS["shallow"]
    finally:
        xl.host.unload()
    assert _classes(xl.unet).count(tuned.TunedResBlock) == 0


def test_swapped_blocks_that_the_hosts_unet_can_call_run_as_their_owner_wants(
    xl: Pair, tuned: Any
) -> None:
    try:
        calls = xl.check(lambda model: tuned.swapped(model, only=tuned.BasicTransformerBlock))
        assert calls == CALLS
    finally:
        xl.host.unload()


def test_a_swapped_class_of_the_blocks_own_lists_is_left_to_its_owner(xl: Pair, tuned: Any) -> None:
    ours = cached(xl.model)
    ours.add_object_patch("diffusion_model.output_blocks.5.__class__", tuned.TunedSequential)
    try:
        assert torch.equal(xl.sample(ours), xl.sample(xl.model))
        assert "TunedSequential" in (cache_of(ours).problem or "")
    finally:
        xl.host.unload()


def test_a_class_that_is_swapped_around_one_call_is_left_to_its_owner(xl: Pair, tuned: Any) -> None:
    """As a wrapper does that knows the step."""
    from comfy.patcher_extension import WrappersMP

    class Late(tuned.UNetModel):
        pass

    number, held = 0, list[int]()

    def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += 1
        xl.unet.__class__ = Late if number > 2 else tuned.UNetModel
        try:
            return executor(*args, **kwargs)
        finally:
            xl.unet.__class__ = tuned.UNetModel
            run = cache_of(ours)._run
            assert run is not None
            held.append(len(list(run.kept)))

    ours = cached(xl.model)
    ours.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "tests.late", around)
    xl.sample(ours)
    assert "Late" in (cache_of(ours).problem or "")
    assert sum(cache_of(ours).evaluations.values()) == 2
    assert held[1] > 0 == held[2], "what is of no use any more is let go"
