"""Two LATENTs compared: what Compile Report says of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from warmgraph_backends.sessions.latents import latents_part
from warmgraph_backends.sessions.likeness import psnr, ssim
from warmgraph_tools.inprocess import Host


def _said(latent: Any, compared_with: Any) -> str:
    """The text; the page's lines say the same."""
    part = latents_part(latent, compared_with)
    assert part["id"] == "" and "\n".join(each["text"] for each in part["whole"]) == part["text"]
    return str(part["text"])


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Of no range that anybody fixed."""
    return 7 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)) - 2


def _beside(reference: torch.Tensor, share: float) -> torch.Tensor:
    """Every value off by so much of each image's range."""
    flat = reference.flatten(1)
    off = share * (flat.amax(1) - flat.amin(1))
    return reference + off.view(-1, *[1] * (reference.dim() - 1))


def test_the_peak_is_the_references_own_range() -> None:
    reference = _random(1, 4, 16, 16)
    assert _said({"samples": _beside(reference, 0.1)}, {"samples": reference}).startswith(
        "latents: PSNR 20.0 dB, SSIM 0."
    )
    # Whatever the model's scale is.
    scaled = [{"samples": 100 * each + 3} for each in (_beside(reference, 0.01), reference)]
    assert "PSNR 40.0 dB" in _said(*scaled)


def test_of_a_batch_the_mean_error_counts_and_the_worst_is_named() -> None:
    reference = _random(2, 16, 12, 12)
    half = torch.cat([_beside(reference[:1], 0.1), reference[1:]])
    said = _said({"samples": half}, {"samples": reference})
    assert said.startswith("latents: PSNR 23.0 dB, SSIM 0.")  # half of the mean error
    assert "in the mean of 2; 20.0 dB and 0." in said and said.endswith(" at worst")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equal_latents_are_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    latent = {"samples": _random(1, 4, 8, 8).to(dtype)}
    assert _said(latent, {**latent}) == "latents: the same, bit for bit"


@pytest.mark.parametrize(
    "shape",
    [(1, 16, 8, 8), (1, 16, 3, 9, 13), (1, 64, 30), (1, 4, 1, 1), (1, 64), (3, 8, 2, 4, 16)],
    ids=["small", "video", "sound", "a pixel", "a row", "a batch of videos"],
)
def test_any_form_of_latent_is_compared(shape: tuple[int, ...]) -> None:
    """As far as windows of SSIM have room in them."""
    reference = _random(*shape)
    said = _said({"samples": _beside(reference, 0.1).bfloat16()}, {"samples": reference})
    assert said.startswith("latents: PSNR 20.0 dB, SSIM ")


def test_video_and_sound_have_a_line_each(host: Host) -> None:
    from comfy.nested_tensor import NestedTensor

    video, sound = _random(1, 16, 2, 12, 12), _random(1, 8, 20, 16, seed=1)
    reference = {"samples": NestedTensor([video, sound])}
    other = {"samples": NestedTensor([_beside(video, 0.1), sound])}
    first, video_said, second, sound_said = _said(other, reference).splitlines()
    assert first.startswith("part 1 of 2") and second.startswith("part 2 of 2")
    assert "PSNR 20.0 dB" in video_said and sound_said == "latents: the same, bit for bit"
    assert "sizes differ: 1x16x2x12x12, 1x8x20x16 and 1x16x2x12x12" in _said(
        other, {"samples": video}
    )


@pytest.mark.parametrize(
    ("latent", "other", "words"),
    [
        (None, {"samples": _random(1, 4, 8, 8)}, "both have to be linked"),
        ({"samples": _random(1, 4, 8, 8)}, None, "both have to be linked"),
        (
            {"samples": _random(1, 4, 8, 8)},
            {"samples": _random(2, 4, 8, 8)},
            "sizes differ: 1x4x8x8 and 2x4x8x8",
        ),
        (
            {"samples": torch.full((1, 4, 8, 8), math.nan)},
            {"samples": _random(1, 4, 8, 8)},
            "not finite",
        ),
        (
            {"samples": _random(1, 4, 8, 8)},
            {"samples": torch.full((1, 4, 8, 8), math.inf)},
            "not finite",
        ),
        (
            {"samples": _random(1, 4, 8, 8)},
            {"samples": torch.zeros(1, 4, 8, 8)},
            "all of one are the same",
        ),
        ({}, {"samples": _random(1, 4, 8, 8)}, "not compared: 'samples'"),
        ({"samples": "text"}, {"samples": _random(1, 4, 8, 8)}, "not compared: "),
    ],
)
def test_what_cannot_be_compared_is_said(latent: Any, other: Any, words: str) -> None:
    assert words in _said(latent, other)


def test_what_is_given_is_not_changed() -> None:
    reference, latent = _random(1, 4, 8, 8), _random(1, 4, 8, 8, seed=1)
    before = reference.clone(), latent.clone()
    _said({"samples": latent}, {"samples": reference})
    assert torch.equal(reference, before[0]) and torch.equal(latent, before[1])


def test_the_measures_are_of_each_image() -> None:
    """tests/engine/test_denoiser.py compares SSIM with its definition."""
    images, references = torch.rand(3, 4, 15, 12), torch.rand(3, 4, 15, 12)
    for measure in (psnr, ssim):
        each = [measure(images[n : n + 1], references[n : n + 1]) for n in range(3)]
        assert torch.allclose(measure(images, references), torch.cat(each))
    assert ssim(references, references).tolist() == pytest.approx([1.0] * 3)
