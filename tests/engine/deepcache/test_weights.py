"""DeepCache under what changes weights: LoRAs, hypernetworks, and hooks, with their patches."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from .cached import CALLS, Pair, Patch, Reference, cached
from .sampling import step_of


def _lora(pair: Pair, strength: float) -> Patch:
    name = pair.host.model_file("lora", base="narrowxl")
    return pair.patch("LoraLoaderModelOnly", lora_name=name, strength_model=strength)


@pytest.mark.parametrize("branch", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_loras(xl: Pair, branch: int) -> None:
    def both(model: Any) -> Any:
        return _lora(xl, -0.4)(_lora(xl, 1.0)(model))

    for patch in (_lora(xl, 0.8), both):
        assert xl.check(patch, branch=branch) == CALLS


def test_a_lora_on_one_of_two_clones(xl: Pair) -> None:
    """They share a DeepCache; their weights take turns."""
    plain = cached(xl.model)
    changed = _lora(xl, 1.0)(plain)
    expected = [
        xl.sample(model)
        for model in (Reference().attach(xl.model), _lora(xl, 1.0)(Reference().attach(xl.model)))
    ]
    for _ in range(2):
        for model, image in zip((plain, changed), expected, strict=True):
            assert torch.equal(xl.sample(model), image)


def _hooks(pair: Pair, *keyframes: tuple[float, float]) -> Any:
    """A LoRA's hook, with (strength, start) of each keyframe."""
    name = pair.host.model_file("lora", base="narrowxl")
    hooks = pair.node("CreateHookLoraModelOnly", lora_name=name, strength_model=1.0)
    group = None
    for strength, start in keyframes:
        given = {} if group is None else {"prev_hook_kf": group}
        group = pair.node(
            "CreateHookKeyframe", strength_mult=strength, start_percent=start, **given
        )
    return pair.node("SetHookKeyframes", hooks=hooks, hook_kf=group)


def _hooked(pair: Pair, conditioning: Any, hooks: Any, **given: Any) -> Any:
    return pair.node(
        "ConditioningSetProperties",
        cond_NEW=conditioning,
        strength=1.0,
        set_cond_area="default",
        hooks=hooks,
        **given,
    )


def _with_hooks(pair: Pair, *keyframes: tuple[float, float], both: bool = False) -> Any:
    """`sample(model)` under a hook of its own; the host's hooks remember the run before."""

    def sample(model: Any, **sampling: Any) -> torch.Tensor:
        hooks = _hooks(pair, *keyframes)
        positive = _hooked(pair, pair.positive, hooks)
        negative = _hooked(pair, pair.negative, hooks) if both else pair.negative
        return pair.sample(model, positive=positive, negative=negative, **sampling)

    return sample


@pytest.mark.parametrize(
    ("both", "branch"),
    [
        *((False, 0), (True, 3)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 3), (True, 0))),
    ],
)
def test_hooked_loras(xl: Pair, both: bool, branch: int) -> None:
    """On one conditioning only, calls are of two groups with weights of their own."""
    sample = _with_hooks(xl, both=both)
    counts = xl.check(sample=sample, branch=branch)
    assert counts == {sort: (1 if both else 2) * count for sort, count in CALLS.items()}
    assert not torch.equal(sample(xl.model), xl.sample(xl.model))


def test_weights_that_a_hook_changes_in_the_run_take_a_full_step(xl: Pair) -> None:
    """A keyframe changes what all blocks compute, as another patch would."""
    change = step_of(xl, 0.5, 10)
    assert change % 4 and change < 8
    sample = functools.partial(_with_hooks(xl, (0.0, 0.0), (1.0, 0.5), both=True), steps=10)
    xl.check(sample=sample, full={0, 4, 8, change}, options={"interval": 4})


def test_patches_that_a_hook_brings_to_one_conditioning(xl: Pair) -> None:
    import comfy.hooks

    def strong(q: Any, k: Any, v: Any, extra: Any) -> Any:
        return q, k, v * 1.5

    hook = comfy.hooks.TransformerOptionsHook(
        {"patches": {"attn2_patch": [strong]}}, comfy.hooks.EnumHookScope.HookedOnly
    )
    group = comfy.hooks.HookGroup()
    group.add(hook)
    positive = _hooked(xl, xl.positive, group)
    counts = xl.check(positive=positive, branch=3)
    assert counts == {"full": 6, "shallow": 8}


def test_a_hypernetwork(sd15: Pair) -> None:
    folder = Path(sd15.host.folder_paths.get_folder_paths("hypernetworks")[0])
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(4)
    sides = []
    for _ in "kv":
        weights = {}
        for name, shape in {"linear1": (128, 64), "linear2": (64, 128)}.items():
            weights[f"{name}.weight"] = torch.randn(shape, generator=draw) / 8
            weights[f"{name}.bias"] = torch.zeros(shape[0])
        sides.append(weights)
    table = {"activation_func": "swish", "is_layer_norm": False, 64: sides}
    torch.save(table, folder / "outer.pt")
    load = sd15.patch("HypernetworkLoader", hypernetwork_name="outer.pt", strength=0.7)
    assert sd15.check(load) == CALLS
