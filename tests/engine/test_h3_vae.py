"""Compile VAE on the host's MiniMax H3 video VAE: its decoder's blocks, at any size and length."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .lab import Lab, left_behind, relative
from .test_video_vae import latent, random_weights

EXACT = 1e-5
LAYERS, HEADS = 2, 2
CHANNELS = 24
#: How the names of weights end that scale what there is.
_ONES = ("norm1.weight", "norm2.weight", "norm_out.weight", "scale1", "scale2", "latents_std")
#: [batch, frames, height, width] of a latent: an image, a span alone, several, more than one tile
#: of 16 pixels a side (of other sizes, too, where a side is less).
SIZES = [(1, 1, 3, 2), (2, 1, 5, 4), (1, 2, 2, 3), (1, 7, 4, 2), (2, 12, 2, 2), (1, 3, 17, 3)]


def make_h3(seed: int = 0) -> Any:
    """An H3 VAE by the host's own detection, its classes told to be small."""
    import comfy.sd
    from comfy.ldm.minimax import vae

    host, decoder = vae.MiniMaxH3VideoVAE, vae.ViT3DDecoder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vae, "ViT3DDecoder", partial(decoder, num_layers=LAYERS, heads=HEADS))
        narrow = partial(host, ch=32, ch_mult=(1,) * 6, num_res_blocks=1)
        patch.setattr(vae, "MiniMaxH3VideoVAE", narrow)
        weights = random_weights(narrow(), seed)
        for name, value in weights.items():
            if name.endswith(_ONES):  # which `random_weights` leaves close to nothing
                weights[name] = 1 + 5 * value.abs()
        return comfy.sd.VAE(sd=weights)


@pytest.fixture(scope="module")
def h3_lab(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """An engine that builds H3's graph once for this module."""
    named = os.environ.get("WARMGRAPH_TEST_LAB")
    root = Path(named) / "h3-vae" if named else tmp_path_factory.mktemp("h3-vae")
    (root / "user").mkdir(parents=True, exist_ok=True)
    lab = Lab(root)
    yield lab
    lab.engine.close()


@pytest.fixture(scope="module")
def plain(host: Host) -> Any:
    return make_h3()


@pytest.fixture(scope="module")
def compiled(h3_lab: Lab, plain: Any) -> Any:
    """The compiled copy, its graph built or loaded, and every region once compared with eager."""
    with torch.inference_mode():
        vae = h3_lab.engine.compile_vae(plain, when_missing="wait")
        vae.decode(latent(2, 2, 2, channels=CHANNELS))
    report = h3_lab.engine.report(vae)
    assert report["regions"]["eager"] == 0, report["eager"]
    assert [(kind["kind"], kind["places"]) for kind in report["kinds"]] == [
        (f"MiniMax H3 VAE block {64 * HEADS}", LAYERS)
    ]
    return vae


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


def frames_of(latents: int) -> int:
    return 1 if latents == 1 else max(1, (latents - 2) // 5 * 17 + 5)


def test_every_size_and_length_decodes_as_eager_with_no_build(
    h3_lab: Lab, plain: Any, compiled: Any
) -> None:
    jobs = h3_lab.jobs()
    for batch, *sides in SIZES:
        samples = latent(*sides, batch, channels=CHANNELS)
        eager, ours = plain.decode(samples), compiled.decode(samples)
        assert ours.shape[2:] == (16 * sides[1], 16 * sides[2], 3)
        assert relative(ours, eager) < EXACT and not torch.equal(ours, eager)
        report = h3_lab.engine.report(compiled)
        assert report["regions"]["eager"] == 0, report["eager"]
    assert h3_lab.jobs() == jobs
    assert left_behind(plain.first_stage_model) == []
