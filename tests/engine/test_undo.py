"""Without our node everything is as before: the MODEL that came in is never changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, left_behind, relative
from .probed import Probed


def _fingerprint(patcher: Any) -> tuple[Any, ...]:
    """All that our nodes could have changed of a MODEL: bits, modules, the patcher's own state."""
    model = patcher.model
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = [
        (name, id(part), type(part), sorted(part.__dict__), len(part._forward_hooks))
        for name, part in model.named_modules()
    ]
    own = repr(
        [
            patcher.model_options,
            patcher.wrappers,
            patcher.callbacks,
            patcher.attachments,
            patcher.patches,
            patcher.object_patches,
        ]
    )
    return state, modules, own


def _assert_equal(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    assert before[0].keys() == after[0].keys()
    for name, tensor in before[0].items():
        assert torch.equal(tensor, after[0][name]), name
    assert before[1] == after[1]
    assert before[2] == after[2]


def _plain(host: Host) -> tuple[Any, Any]:
    model, clip, _ = host.load("narrowxl")
    prompt = host.encode(clip, "a cat")
    host.sample(model, prompt, prompt, steps=1)  # the host loads it, and leaves what it leaves
    return model, prompt


def test_the_model_that_came_in_is_bit_identical_afterwards(lab: Lab, host: Host) -> None:
    model, prompt = _plain(host)
    before, image = _fingerprint(model), host.sample(model, prompt, prompt)
    compiled = lab.compiled(model)
    assert compiled is not model and compiled.model is model.model
    host.sample(compiled, prompt, prompt, width=72, batch=2)
    _assert_equal(before, _fingerprint(model))
    assert torch.equal(host.sample(model, prompt, prompt), image)
    del compiled
    _assert_equal(before, _fingerprint(model))


def test_two_branches_of_a_checkpoint_in_turn_do_not_meet(lab: Lab, host: Host) -> None:
    model, prompt = _plain(host)
    compiled = lab.compiled(model)
    eager, ours = (host.sample(m, prompt, prompt) for m in (model, compiled))
    assert not torch.equal(eager, ours) and relative(ours, eager) < TOLERANCE
    for _ in range(2):
        assert torch.equal(host.sample(model, prompt, prompt), eager)
        assert torch.equal(host.sample(compiled, prompt, prompt), ours)
    again = lab.compiled(compiled)  # a second node behind the first takes its place
    assert torch.equal(host.sample(again, prompt, prompt), ours)
    assert lab.engine.report(again)["id"] != lab.engine.report(compiled)["id"]


def test_our_forwards_are_in_place_in_a_compiled_models_step_only(probed: Probed) -> None:
    seen: list[list[str]] = []

    def watch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(left_behind(probed.unet))
        return executor(*args, **kwargs)

    from comfy.patcher_extension import WrappersMP

    eager = probed.plain.clone()
    eager.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "watch", watch)
    compiled = probed.model.clone()
    compiled.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "watch", watch)
    for model in (compiled, eager, compiled, eager):
        probed.sample(model, cfg=1.0)
    assert [bool(names) for names in seen] == [True, False, True, False]


class StopError(Exception):
    """What another node's patch raises."""


def _raising(model: Any, error: Callable[[], None]) -> Any:
    """A patched clone whose first input block calls `error` in the middle of each step."""
    clone = model.clone()

    def patch(h: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        if options["block"] == ("input", 3):
            error()
        return h

    clone.set_model_input_block_patch(patch)
    return clone


def test_an_exception_in_the_middle_of_a_step_leaves_nothing_behind(probed: Probed) -> None:
    image = probed.check(steps=2)
    seen: list[int] = []

    def stop() -> None:
        seen.append(len(left_behind(probed.unet)))
        raise StopError

    with pytest.raises(StopError):
        probed.sample(_raising(probed.model, stop))
    # The probe runs the host's own code first, and that call stops already.
    assert seen == [0]
    bare = probed.lab.compiled(probed.plain)
    with pytest.raises(StopError):
        probed.sample(_raising(bare, stop))
    assert len(seen) == 2 and seen[1] > 10  # our forwards were in place when it was raised
    assert left_behind(probed.unet) == []
    assert probed.lab.engine._prompts.sampling == 0
    assert torch.equal(probed.check(steps=2), image)


def test_cancel_in_the_middle_of_a_step_leaves_nothing_behind(probed: Probed) -> None:
    import comfy.model_management as management

    image = probed.check(steps=2)
    steps: list[int] = []

    def cancel() -> None:
        steps.append(1)
        management.interrupt_current_processing(True)

    bare = probed.lab.compiled(probed.plain)
    try:
        with pytest.raises(management.InterruptProcessingException):
            probed.sample(_raising(bare, cancel), steps=8)
    finally:
        management.interrupt_current_processing(False)
    assert len(steps) == 1, "the next step must not be computed"
    assert left_behind(probed.unet) == []
    assert probed.lab.engine._prompts.sampling == 0
    assert torch.equal(probed.check(steps=2), image)


def test_nothing_of_a_dropped_model_stays(host: Host, make_lab: Callable[..., Lab]) -> None:
    import gc

    before, lab = threading.active_count(), make_lab()
    model = Probed(lab, host)
    model.check()
    assert [m["id"] for m in lab.engine.overview.snapshot()["models"]] == [model.report()["id"]]
    del model
    gc.collect()
    assert lab.engine.overview.snapshot()["models"] == []
    assert threading.active_count() - before < 20
