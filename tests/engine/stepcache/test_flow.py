"""Step Cache on models of flow matching: transformers, videos with sound, two models in a run, and
a model that is spread over two cards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.small_kinds import CAUSAL_WAN

from ..av_runs import known_frame
from ..cards import cards, split
from ..deepcache.cached import Pair
from .small import Small
from .stepped import STEPS, Reference, cache_of, check, evaluations, stepped

__all__ = ["cards"]


@pytest.fixture(autouse=True)
def _unloaded(host: Host) -> Iterator[None]:
    with torch.inference_mode():
        yield
    host.unload()


@pytest.mark.parametrize(
    "kind", ["zimage", *(pytest.param(k, marks=pytest.mark.slow) for k in ("flux1", "qwen", "wan"))]
)
@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_a_flow_model(host: Host, kind: str, cfg: float) -> None:
    small = Small(host, kind)
    assert check(small, reference=Reference(is_flow=True), cfg=cfg) == {"full": 7, "forecast": 5}


@pytest.mark.parametrize(
    "kind", ["ltx23", *(pytest.param(k, marks=pytest.mark.slow) for k in ("ltx2", "h3_curves"))]
)
@pytest.mark.parametrize("frame", ["none", "known"])
def test_video_and_audio_together(host: Host, kind: str, frame: str) -> None:
    """The host packs both into one latent; of a known frame nothing is denoised."""
    small = Small(host, kind)
    latent = transformers.latent(kind, 4, 6, frames=3, sounds=7)
    if frame == "known":
        latent, _ = known_frame(0.3)(latent, None)
    reference = Reference(is_flow=True)
    counts = check(small, reference=reference, cfg=3.0, latent=latent, scheduler="simple")
    assert counts == {"full": 7, "forecast": 5}


def test_a_model_that_keeps_something_of_each_step_is_left_alone(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Wan's that makes a video block by block, by a sampler of its own."""
    monkeypatch.setitem(transformers.KINDS, "causal", CAUSAL_WAN)
    small = Small(host, "causal")

    def sample(model: Any) -> torch.Tensor:
        (latent, _) = host.node(
            "SamplerCustom",
            model=model,
            add_noise=True,
            noise_seed=2,
            cfg=1.0,
            positive=small.prompt,
            negative=small.negative,
            sampler=host.node("SamplerARVideo", num_frame_per_block=1)[0],
            sigmas=host.node(
                "BasicScheduler", model=model, scheduler="simple", steps=STEPS, denoise=1.0
            )[0],
            latent_image=transformers.latent("causal", 8, 8, frames=3),
        )
        image: torch.Tensor = latent["samples"]
        return image

    ours = stepped(small.model)
    assert torch.equal(sample(ours), sample(small.model))
    cache = cache_of(ours)
    assert "block by block" in (cache.problem or "") and not cache.evaluations


def test_two_models_in_a_run_are_two_runs(host: Host) -> None:
    """As Wan 2.2's: each samples a part of the steps, by sigmas of its own."""
    small = Small(host, "wan")
    other = transformers.load("wan")
    steps, parts = 24, [(0, 12), (12, 24)]

    def sample(models: list[Any]) -> torch.Tensor:
        latent = {"samples": transformers.latent("wan", 8, 8)["samples"]}
        image: torch.Tensor = host.sample_parts(
            models, small.prompt, small.prompt, parts, steps=steps, latent=latent
        )
        return image

    references = [Reference(is_flow=True), Reference(is_flow=True)]
    pairs = zip((small.model, other), references, strict=True)
    expected = sample([reference.attach(model) for model, reference in pairs])
    ours = [stepped(small.model), stepped(other)]
    assert torch.equal(sample(ours), expected)
    assert [evaluations(model) for model in ours] == [{"full": 7, "forecast": 5}] * 2


def test_a_model_on_two_cards(host: Host, xl: Pair, cards: None) -> None:
    """Around the split, which computes what is computed."""
    expected = xl.sample(stepped(xl.model), steps=STEPS)
    for ours in (stepped(split(xl.model)), split(stepped(xl.model))):
        found = xl.sample(ours, steps=STEPS)
        assert evaluations(ours) == {"full": 7, "forecast": 5}
        assert (found - expected).norm() <= 1e-4 * expected.norm()
