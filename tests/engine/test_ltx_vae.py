"""Compile VAE on the host's LTX video VAEs: whole and in pieces of any size and length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .lab import Lab, lab_of_its_own, left_behind, relative
from .test_video_vae import latent, random_weights, video

EXACT = 1e-5
WIDTH = 8
#: Bytes of a piece: all at once, some frames, and single ones.
PIECES = {"whole": 2**40, "some": 20_000, "single": 1}
#: [batch, frames, height, width] of a latent.
SIZES = [(1, 1, 2, 3), (1, 2, 3, 2), (2, 4, 2, 2), (1, 7, 1, 2)]

CONFIG = {
    "_class_name": "CausalVideoAutoencoder",
    "dims": 3,
    "latent_channels": 128,
    "encoder_base_channels": WIDTH,
    "decoder_base_channels": WIDTH,
    "encoder_blocks": [["res_x", 1], *[["compress_all", 1]] * 3, ["res_x", 1]],
    "decoder_blocks": [["res_x", 2], *[["compress_all", {"multiplier": 1}]] * 3, ["res_x", 1]],
    "norm_layer": "pixel_norm",
    "patch_size": 4,
    "latent_log_var": "uniform",
    "causal_decoder": False,
    "timestep_conditioning": False,
    "spatial_padding_mode": "zeros",
}


def make_ltx(seed: int = 0, **others: Any) -> Any:
    """An LTX VAE by the host's own detection, from a file whose metadata tell its blocks."""
    import comfy.sd
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    config = CONFIG | others
    weights = random_weights(VideoVAE(config=config), seed)
    for name in weights:
        if name.endswith("std-of-means"):
            weights[name] = 1 + weights[name].abs()
    return comfy.sd.VAE(sd=weights, metadata={"config": json.dumps({"vae": config})})


@pytest.fixture(scope="module")
def ltx_lab(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """An engine that builds LTX's graphs once for this module."""
    yield from lab_of_its_own("ltx-vae", tmp_path_factory)


@pytest.fixture(scope="module")
def plain(host: Host) -> Any:
    return make_ltx()


@pytest.fixture(scope="module")
def compiled(ltx_lab: Lab, plain: Any) -> Any:
    """The compiled copy, its graphs built or loaded, and every region once compared with eager."""
    with torch.inference_mode():
        vae = ltx_lab.engine.compile_vae(plain, when_missing="wait")
        vae.decode(latent(2, 2, 2, channels=128))
    report = ltx_lab.engine.report(vae)
    assert report["regions"]["eager"] == 0, report["eager"]
    assert sorted(kind["kind"] for kind in report["kinds"]) == [
        f"LTX VAE last norm {WIDTH}",
        f"LTX VAE residual {WIDTH}->{WIDTH}",
        f"LTX VAE upsampling {WIDTH}",
    ]
    return vae


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(params=PIECES)
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The host makes a video in pieces of so many bytes."""
    from comfy.ldm.lightricks.vae import causal_video_autoencoder as module

    monkeypatch.setattr(module, "get_max_chunk_size", lambda _: PIECES[request.param])
    return str(request.param)


def kept(vae: Any) -> list[str]:
    """Modules that keep frames."""
    modules = vae.first_stage_model.named_modules()
    return [name for name, m in modules if getattr(m, "temporal_cache_state", None)]


def test_every_size_length_and_piece_decodes_as_eager_with_no_build(
    ltx_lab: Lab, plain: Any, compiled: Any, piece: str
) -> None:
    jobs = ltx_lab.jobs()
    for batch, *sides in SIZES:
        samples = latent(*sides, batch, channels=128)
        eager, ours = plain.decode(samples), compiled.decode(samples)
        assert ours.shape == (batch, 8 * sides[0] - 7, 32 * sides[1], 32 * sides[2], 3)
        assert relative(ours, eager) < EXACT and not torch.equal(ours, eager)
        frames = video(8 * sides[0] - 7, 32 * sides[1], 32 * sides[2])
        assert torch.equal(compiled.encode(frames), plain.encode(frames))  # the host's own
        report = ltx_lab.engine.report(compiled)
        assert report["regions"]["eager"] == 0, report["eager"]
    assert ltx_lab.jobs() == jobs
    assert kept(plain) == [] and left_behind(plain.first_stage_model) == []


def test_tiles_in_space_and_time_are_just_sizes(ltx_lab: Lab, plain: Any, compiled: Any) -> None:
    jobs = ltx_lab.jobs()
    before = ltx_lab.engine.report(compiled)["calls"]["compiled"]
    samples = latent(4, 3, 4, channels=128)
    tiles = {"tile_x": 3, "tile_y": 2, "overlap": 1, "tile_t": 2, "overlap_t": 1}
    ours = compiled.decode_tiled(samples, **tiles)
    assert relative(ours, plain.decode_tiled(samples, **tiles)) < EXACT
    assert ltx_lab.engine.report(compiled)["calls"]["compiled"] > before
    assert ltx_lab.jobs() == jobs and left_behind(plain.first_stage_model) == []


def test_a_new_servers_engine_loads_the_graphs_for_another_vae(
    ltx_lab: Lab, compiled: Any, tmp_path: Path
) -> None:
    other = make_ltx(seed=1)
    later = ltx_lab.copy_to(tmp_path)
    try:
        vae = later.engine.compile_vae(other, when_missing="wait")
        samples = latent(3, 2, 2, channels=128)
        assert relative(vae.decode(samples), other.decode(samples)) < EXACT
        report = later.engine.report(vae)
        assert report["regions"]["eager"] == 0 and later.jobs() == 0
    finally:
        later.engine.close()
