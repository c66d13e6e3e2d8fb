"""Compile VAE on the host's MiniMax H3 video VAE: its decoder's blocks, at any size and length."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.families.catalogue import plan_model
from warmgraph_backends.plans.plan import Plan
from warmgraph_tools.inprocess import Host
from warmgraph_tools.quantised import quantised
from warmgraph_tools.small_vaes import h3_weights, load_h3

from .lab import Lab, lab_of_its_own, left_behind, relative
from .others import Counting
from .test_video_vae import latent, video

EXACT = 1e-5
#: Where an input's last bit moves, so does a whole step of eight bits.
INT8 = 1e-2
LABEL, LAYERS = "MiniMax H3 VAE block 256", 2
CHANNELS = 24
#: [batch, frames, height, width] of a latent: an image, a span alone, several, more than one tile
#: of 16 pixels a side (of other sizes, too, where a side is less).
SIZES = [(1, 1, 3, 2), (2, 1, 5, 4), (1, 2, 2, 3), (1, 7, 4, 2), (2, 12, 2, 2), (1, 3, 17, 3)]


@pytest.fixture(scope="module")
def h3_lab(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """An engine that builds H3's graph once for this module."""
    yield from lab_of_its_own("h3-vae", tmp_path_factory)


@pytest.fixture(scope="module")
def plain(host: Host) -> Any:
    return load_h3(h3_weights())


@pytest.fixture(scope="module")
def compiled(h3_lab: Lab, plain: Any) -> Any:
    """The compiled copy, its graph built or loaded, and every region once compared with eager."""
    with torch.inference_mode():
        vae = h3_lab.engine.compile_vae(plain, when_missing="wait")
        vae.decode(latent(2, 2, 2, channels=CHANNELS))
    report = h3_lab.engine.report(vae)
    assert report["regions"]["eager"] == 0, report["eager"]
    assert [(kind["kind"], kind["places"]) for kind in report["kinds"]] == [(LABEL, LAYERS)]
    return vae


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


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


def test_tiles_are_the_hosts_own_and_encoding_is_as_without_us(
    h3_lab: Lab, plain: Any, compiled: Any
) -> None:
    jobs, samples = h3_lab.jobs(), latent(2, 3, 18, channels=CHANNELS)
    ours = compiled.decode_tiled(samples, tile_x=8, tile_y=8, overlap=2)
    assert h3_lab.engine.report(compiled)["regions"]["compiled"] == LAYERS
    assert relative(ours, plain.decode_tiled(samples, tile_x=8, tile_y=8, overlap=2)) < EXACT
    frames = video(5, 32, 48)
    assert torch.equal(compiled.encode(frames), plain.encode(frames))
    assert h3_lab.jobs() == jobs


def test_a_new_process_loads_the_graph(
    h3_lab: Lab, plain: Any, compiled: Any, tmp_path: Path
) -> None:
    lab = h3_lab.copy_to(tmp_path)
    try:
        vae = lab.engine.compile_vae(plain, when_missing="never")
        samples = latent(3, 2, 4, channels=CHANNELS)
        assert relative(vae.decode(samples), plain.decode(samples)) < EXACT
        assert lab.counts(vae) == (0, 1, 0)
        assert lab.jobs() == 0
    finally:
        lab.engine.close()


def test_another_nodes_hook_on_a_block_acts_around_its_graph(
    h3_lab: Lab, plain: Any, compiled: Any
) -> None:
    samples = latent(1, 4, 3, channels=CHANNELS)
    unhooked = plain.decode(samples)
    block = plain.first_stage_model.decoder.transformer_blocks[0]
    hook = block.register_forward_hook(lambda module, given, result: -result)
    try:
        eager = plain.decode(samples)
        assert relative(compiled.decode(samples), eager) < EXACT < relative(unhooked, eager)
        assert h3_lab.engine.report(compiled)["regions"]["eager"] == 0
    finally:
        hook.remove()


def test_others_code_in_a_block_is_called_in_the_order_of_eager(
    h3_lab: Lab, plain: Any, compiled: Any
) -> None:
    samples, counting = latent(1, 4, 3, channels=CHANNELS), Counting()
    unchanged = plain.decode(samples)
    block = plain.first_stage_model.decoder.transformer_blocks[0]
    parts = {"ff": block.ff, "attn": block.attn}
    for name, part in parts.items():
        part.forward = counting.around(name, part.forward)
    try:
        _check_order(h3_lab, plain, compiled, samples, counting)
        assert relative(plain.decode(samples), unchanged) > EXACT
    finally:
        for part in parts.values():
            del part.forward


def _check_order(lab: Lab, plain: Any, compiled: Any, samples: Any, counting: Counting) -> None:
    compiled.decode(samples)
    lab.wait_until(lambda: not lab.engine._graphs.awaited())
    compiled.decode(samples)  # compared with the host's maths
    found = []
    for vae in (compiled, plain):
        counting.begin()
        found.append((vae.decode(samples), list(counting.calls)))
    (ours, calls), (eager, expected) = found
    assert calls == expected == ["attn", "ff"]
    assert relative(ours, eager) < EXACT
    assert lab.engine.report(compiled)["regions"]["eager"] == 0


def test_a_block_of_another_class_is_the_hosts_and_named(host: Host) -> None:
    from comfy.ldm.minimax.vae import TransformerBlock

    class Other(TransformerBlock):
        pass

    root = load_h3(h3_weights()).first_stage_model
    root.decoder.transformer_blocks[1].__class__ = Other
    plan = plan_model(root)
    assert isinstance(plan, Plan)
    assert [place.name for place in plan.places] == ["decoder.transformer_blocks.0"]
    [(name, reason)] = plan.outside
    assert name == "decoder.transformer_blocks.1" and "Other" in reason


def test_a_decoder_that_rotates_another_part_of_each_head_is_the_hosts_and_named(
    host: Host,
) -> None:
    root = load_h3(h3_weights()).first_stage_model
    root.decoder.pos_embed = type(root.decoder.pos_embed)(32)
    plan = plan_model(root)
    assert isinstance(plan, str) and "rotates another part of each head" in plan


def test_the_encoder_alone_has_nothing_to_compile_and_says_so(h3_lab: Lab, plain: Any) -> None:
    vae = h3_lab.engine.compile_vae(plain, parts="encoder", when_missing="never")
    frames = video(1, 32, 32)
    assert torch.equal(vae.encode(frames), plain.encode(frames))
    assert h3_lab.engine.report(vae)["notes"] == [
        "nothing of this MiniMaxH3VideoVAE's encoder is compiled yet: runs at normal speed"
    ]


@pytest.mark.slow
def test_a_decoder_in_int8_is_compiled_as_well(h3_lab: Lab) -> None:
    from comfy.ldm.minimax.vae import ViT3DDecoder

    if "operations" not in inspect.signature(ViT3DDecoder).parameters:
        pytest.skip("this host reads no such file")
    plain = load_h3(quantised(h3_weights(), "int8_convrot"))
    vae = h3_lab.engine.compile_vae(plain, when_missing="wait")
    vae.decode(latent(2, 2, 2, channels=CHANNELS))
    jobs, samples = h3_lab.jobs(), latent(3, 4, 3, channels=CHANNELS)
    assert relative(vae.decode(samples), plain.decode(samples)) < INT8
    report = h3_lab.engine.report(vae)
    assert (report["regions"]["compiled"], report["regions"]["eager"]) == (LAYERS, 0), report
    assert h3_lab.jobs() == jobs
