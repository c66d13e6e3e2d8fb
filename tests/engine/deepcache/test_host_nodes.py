"""DeepCache beside nodes of the host that patch a model.

What draws random numbers or keeps something of an earlier call equals the reference only where its
draws and its memory are made the same in both, since outer blocks alone call it less often.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .cached import CALLS, Pair, Patch, Reference, by_turns, cached, changed, evaluations

SLOW = pytest.mark.slow
NODES: dict[str, dict[str, Any]] = {
    "FreeU": {"b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2},
    "FreeU_V2": {"b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2},
    "NAGuidance": {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5},
    "RescaleCFG": {"multiplier": 0.7},
    "Mahiro": {},
    "APG": {"eta": 0.5, "norm_threshold": 5.0, "momentum": 0.3},
    "CFGZeroStar": {},
    "TCFG": {},
    "FreSca": {"scale_low": 1.0, "scale_high": 1.5, "freq_cutoff": 2},
    "Epsilon Scaling": {"scaling_factor": 1.02},
    "PerturbedAttentionGuidance": {"scale": 2.0},
    "UNetCrossAttentionMultiply": {"q": 1.2, "k": 0.8, "v": 1.1, "out": 1.0},
}


#: They act as RescaleCFG does, on what the calls have given, or as the other FreeU.
_ALIKE = ("FreeU", "Mahiro", "CFGZeroStar", "TCFG", "FreSca", "Epsilon Scaling")


@pytest.mark.parametrize(("kind", "branch", "name"), by_turns(NODES, rarely=_ALIKE))
def test_nodes_of_the_host(
    pairs: dict[str, Pair], kind: str, branch: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs[kind]
    # FreeU looks for widths of 4 and 2 times the model's; a narrow model's are all 64.
    config = pair.model.model.model_config.unet_config
    monkeypatch.setitem(config, "model_channels", 16 if name == "FreeU" else 32)
    calls = 2 if name == "PerturbedAttentionGuidance" else 1
    counts = pair.check(pair.patch(name, **NODES[name]), branch=branch, height=72)
    assert counts == {sort: calls * count for sort, count in CALLS.items()}


@pytest.mark.parametrize("words", [4, pytest.param(400, marks=SLOW)])
def test_perturbed_attention_never_meets_the_plain_calls_feature(xl: Pair, words: int) -> None:
    """With cond and uncond apart, both calls of the positive conditioning have one form."""
    guidance = xl.patch("PerturbedAttentionGuidance", scale=3.0)
    counts = xl.check(guidance, positive=xl.prompt("cat " * words), branch=1)
    assert counts == {sort: (2 if words == 4 else 3) * count for sort, count in CALLS.items()}


def test_perpendicular_negative(xl: Pair) -> None:
    patch = xl.patch("PerpNeg", empty_conditioning=xl.prompt(""), neg_scale=0.7)
    assert xl.check(patch) == {"full": 6, "shallow": 8}


@pytest.mark.parametrize("words", [4, pytest.param(400, marks=SLOW)])
def test_self_attention_guidance(sd15: Pair, words: int) -> None:
    """It blurs where the middle block's attention is: in shallow steps, that of the last full one.

    The reference computes the middle block at every step, so its recording is kept out there.
    """
    patch = sd15.patch("SelfAttentionGuidance", scale=0.8, blur_sigma=2.0)
    positive = sd15.prompt("cat " * words)
    reference = Reference()

    def at_full_steps(model: Any) -> Any:
        place = ("middle", 0, 0)
        record = model.model_options["transformer_options"]["patches_replace"]["attn1"][place]

        def attention(q: Any, k: Any, v: Any, extra: Any) -> Any:
            return record(q, k, v, extra) if reference.is_full else q

        clone = model.clone()
        clone.set_model_attn1_replace(attention, *place)
        return clone

    expected = sd15.sample(at_full_steps(patch(reference.attach(sd15.model))), positive=positive)
    plain = sd15.sample(patch(sd15.model), positive=positive)
    assert not torch.equal(expected, plain)
    for ours in (patch(cached(sd15.model)), cached(patch(sd15.model))):
        assert torch.equal(sd15.sample(ours, positive=positive), expected)
        assert evaluations(ours) == reference.counts
    always = cached(patch(sd15.model), interval=1)
    assert torch.equal(sd15.sample(always, positive=positive), plain)


@pytest.mark.parametrize(
    ("branch", "block", "after_skip"),
    [
        *((0, 1, True), (2, 3, True)),
        *(pytest.param(0, 3, False, marks=SLOW), pytest.param(2, 1, False, marks=SLOW)),
        *(pytest.param(0, 1, False, marks=SLOW), pytest.param(0, 3, True, marks=SLOW)),
        *(pytest.param(2, 1, True, marks=SLOW), pytest.param(2, 3, False, marks=SLOW)),
    ],
)
def test_deep_shrink(xl: Pair, block: int, after_skip: bool, branch: int) -> None:
    """It ends in the middle of an interval."""
    patch = xl.patch(
        "PatchModelAddDownscale",
        block_number=block,
        downscale_factor=1.7,
        start_percent=0.0,
        end_percent=0.6,
        downscale_after_skip=after_skip,
        downscale_method="bicubic",
        upscale_method="bilinear",
    )
    assert xl.check(patch, branch=branch, width=104, height=72) == CALLS


def test_differential_diffusion(xl: Pair) -> None:
    mask = torch.linspace(0, 1, 72).expand(1, 64, 72)
    latent = {"samples": torch.full((1, 4, 8, 9), 0.3)}
    latent = xl.node("SetLatentNoiseMask", samples=latent, mask=mask)
    assert xl.check(xl.patch("DifferentialDiffusion"), latent=latent, denoise=0.8) == CALLS


def test_hyper_tile_of_one_size(sd15: Pair) -> None:
    tile = sd15.patch("HyperTile", tile_size=32, swap_size=1, max_depth=1, scale_depth=False)
    assert sd15.check(tile, width=128, height=128, steps=4, full={0, 3}) == {
        "full": 2,
        "shallow": 2,
    }


def _evaluation_counted(count: Callable[[], None]) -> Patch:
    from comfy.patcher_extension import WrappersMP

    def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
        count()
        return executor(*args, **kwargs)

    return changed(
        lambda model: model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "tests.count", around)
    )


def test_hyper_tile_with_the_same_draws(sd15: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = 0
    drawn: set[int] = set()

    def count() -> None:
        nonlocal evaluation
        evaluation += 1

    def draw(low: int, high: int, size: tuple[int, ...]) -> torch.Tensor:
        drawn.add(evaluation % high)
        return torch.tensor([evaluation % high])

    monkeypatch.setattr(sd15.module_of("HyperTile"), "randint", draw)
    tile = sd15.patch("HyperTile", tile_size=32, swap_size=3, max_depth=1, scale_depth=False)

    def sample(model: Any, **sampling: Any) -> torch.Tensor:
        nonlocal evaluation
        evaluation = 0
        counted = _evaluation_counted(count)(model)
        return sd15.sample(counted, width=128, height=128, steps=4, **sampling)

    assert sd15.check(tile, sample=sample, full={0, 3}) == {"full": 2, "shallow": 2}
    assert len(drawn) == 2


def test_merged_tokens_with_the_same_draws(sd15: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    name, module = "bipartite_soft_matching_random2d", sd15.module_of("TomePatchModel")
    host = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: host(*args[:6], no_rand=True))
    merge = sd15.patch("TomePatchModel", ratio=0.5)
    for branch in (0, 1):
        assert sd15.check(merge, branch=branch, width=72) == CALLS


@pytest.mark.parametrize("name", ["HyperTile", "TomePatchModel"])
def test_what_draws_random_numbers_is_no_reason_to_step_aside(sd15: Pair, name: str) -> None:
    """Outer blocks draw what they like: there is nothing to compare the shallow call with."""
    widgets: dict[str, Any] = {
        "HyperTile": {"tile_size": 32, "swap_size": 3, "max_depth": 0, "scale_depth": False},
        "TomePatchModel": {"ratio": 0.5},
    }
    ours = cached(sd15.patch(name, **widgets[name])(sd15.model))
    sd15.sample(ours, width=128, height=128, steps=4)
    assert evaluations(ours) == {"full": 2, "shallow": 2}
