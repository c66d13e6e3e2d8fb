"""Compile VAE on the host's video VAEs: Wan's by its own plan at any size and length, others eager
and named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .elsewhere import DEFAULT, REASON, UNLIKE, one_more_argument
from .lab import Lab, call_instead, lab_of_its_own, left_behind, relative

DECODED = 1e-5
DIM = 8
#: [batch, frames, height, width] of a latent; one frame is an image of Qwen-Image.
SIZES = [(1, 1, 4, 4), (2, 2, 5, 3), (1, 3, 2, 7), (1, 4, 3, 3), (1, 5, 4, 2), (3, 1, 1, 1)]


def random_weights(module: torch.nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of a module's names and shapes that keep activations of order one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in module.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("gamma"):
            weights[name] = 1 + 0.1 * noise
        elif tensor.dim() > 1:
            weights[name] = noise / tensor[0].numel() ** 0.5
        else:
            weights[name] = 0.02 * noise
    return weights


def make_wan21(seed: int = 0, **options: Any) -> Any:
    """A Wan 2.1 VAE by the host's own detection, 8 channels wide."""
    import comfy.sd
    from comfy.ldm.wan.vae import WanVAE

    shape = {"dim": DIM, "z_dim": 16, "temperal_downsample": [False, True, True]}
    return comfy.sd.VAE(sd=random_weights(WanVAE(**shape), seed), **options)


def make_wan22() -> Any:
    """A Wan 2.2 VAE by the host's own detection, its class told to be 8 channels wide."""
    import comfy.sd
    from comfy.ldm.wan import vae2_2

    host = vae2_2.WanVAE
    narrow = {"dim": DIM, "dec_dim": DIM}
    shape = {"z_dim": 48, "temperal_downsample": [False, True, True]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vae2_2, "WanVAE", lambda **config: host(**{**config, **narrow}))
        return comfy.sd.VAE(sd=random_weights(host(**narrow, **shape)))


def latent(frames: int, height: int, width: int, batch: int = 1, channels: int = 16) -> Any:
    generator = torch.Generator().manual_seed(frames)
    return torch.randn(batch, channels, frames, height, width, generator=generator)


def video(frames: int, height: int, width: int) -> Any:
    return torch.rand(frames, height, width, 3, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def wan_lab(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """An engine that builds Wan's graphs once for this module."""
    yield from lab_of_its_own("wan", tmp_path_factory)


@pytest.fixture(scope="module")
def plain(host: Host) -> Any:
    return make_wan21()


@pytest.fixture(scope="module")
def compiled(wan_lab: Lab, plain: Any) -> Any:
    """The compiled copy, its graphs built or loaded, and every region once compared with eager.

    Tests with all five of its graphs are slow; one graph shows in the others what there is to show.
    """
    with torch.inference_mode():
        vae = wan_lab.engine.compile_vae(plain, when_missing="wait")
        vae.decode(latent(2, 4, 4))
        vae.encode(video(5, 32, 32))
    report = wan_lab.engine.report(vae)
    assert report["regions"]["eager"] == 0, report["eager"]
    assert report["regions"]["total"] + report["idle"] == 53  # the other half did not run last
    assert len(report["kinds"]) == 5
    return vae


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_a_norms_graph_serves_every_size_and_length_with_no_build(wan_lab: Lab, plain: Any) -> None:
    vae = wan_lab.engine.compile_vae(plain, when_missing="never")
    label = f"Wan VAE norm {DIM}"
    wan_lab.build_only(vars(vae)["warmgraph"].session, [label])
    jobs = wan_lab.jobs()
    for batch, *sides in SIZES:
        samples = latent(*sides, batch)
        eager = plain.decode(samples)
        assert eager.shape[:2] == (batch, 4 * sides[0] - 3)
        ours = vae.decode(samples)
        assert relative(ours, eager) < DECODED and not torch.equal(ours, eager)
    frames = video(5, 16, 48)
    assert relative(vae.encode(frames), plain.encode(frames)) < DECODED
    report = wan_lab.engine.report(vae)
    ready = {kind["kind"]: kind["places"] for kind in report["kinds"] if kind["state"] == "ready"}
    assert label in ready and report["regions"]["compiled"] + report["idle"] == sum(ready.values())
    assert report["calls"]["compiled"] > 0 and wan_lab.jobs() == jobs
    assert left_behind(plain.first_stage_model) == []


def test_a_newer_hosts_argument_leaves_norms_to_it_and_ends_no_prompt(
    wan_lab: Lab, plain: Any
) -> None:
    from comfy.ldm.wan.vae import RMS_norm

    samples = latent(2, 4, 4)
    eager = plain.decode(samples)
    for changed, value, is_ours in (
        (RMS_norm, UNLIKE, False),
        (RMS_norm, DEFAULT, True),
        (torch.nn.SiLU, UNLIKE, True),  # whose part is done by then
    ):
        with one_more_argument(changed, value):
            vae = wan_lab.engine.compile_vae(plain, when_missing="never")
            wan_lab.build_only(vars(vae)["warmgraph"].session, [f"Wan VAE norm {DIM}"])
            assert relative(vae.decode(samples), eager) < DECODED
            report = wan_lab.engine.report(vae)
        reasons = {entry["reason"] for entry in report["eager"]}
        assert (REASON not in reasons) == (report["calls"]["compiled"] > 0) == is_ours


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_size_and_length_decodes_as_eager_with_no_build(
    wan_lab: Lab, plain: Any, compiled: Any, size: tuple[int, int, int, int]
) -> None:
    jobs = wan_lab.jobs()
    batch, *sides = size
    samples = latent(*sides, batch)
    eager = plain.decode(samples)
    assert eager.shape[:2] == (batch, 4 * sides[0] - 3)
    assert relative(compiled.decode(samples), eager) < DECODED
    report = wan_lab.engine.report(compiled)
    assert wan_lab.jobs() == jobs and report["regions"]["eager"] == 0, report["eager"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 32, 32), (5, 16, 48), (9, 40, 24), (13, 8, 8)], ids=str)
def test_every_size_and_length_encodes_as_eager_with_no_build(
    wan_lab: Lab, plain: Any, compiled: Any, size: tuple[int, int, int]
) -> None:
    jobs = wan_lab.jobs()
    frames = video(*size)
    assert relative(compiled.encode(frames), plain.encode(frames)) < DECODED
    report = wan_lab.engine.report(compiled)
    assert wan_lab.jobs() == jobs and report["regions"]["eager"] == 0, report["eager"]


@pytest.mark.slow
def test_tiles_in_space_and_time_are_just_sizes(wan_lab: Lab, plain: Any, compiled: Any) -> None:
    jobs = wan_lab.jobs()
    samples, frames = latent(3, 4, 5), video(9, 32, 40)
    tiles = {"tile_x": 3, "tile_y": 4, "overlap": 1, "tile_t": 2, "overlap_t": 1}
    before = wan_lab.engine.report(compiled)["calls"]["compiled"]
    ours = compiled.decode_tiled(samples, **tiles)
    assert wan_lab.engine.report(compiled)["calls"]["compiled"] > before
    assert relative(ours, plain.decode_tiled(samples, **tiles)) < DECODED
    tiles = {"tile_x": 24, "tile_y": 32, "overlap": 8, "tile_t": 5, "overlap_t": 1}
    ours = compiled.encode_tiled(frames, **tiles)
    assert relative(ours, plain.encode_tiled(frames, **tiles)) < DECODED
    assert wan_lab.jobs() == jobs
    assert left_behind(plain.first_stage_model) == []


@pytest.mark.slow
def test_each_region_serves_each_call(wan_lab: Lab, compiled: Any) -> None:
    before = wan_lab.engine.report(compiled)["calls"]["compiled"]
    compiled.decode(latent(1, 4, 4))
    decoder = 2 * (2 + 4 * 3) + 1 + 3  # two norms a residual block, the head's, three upsamplings
    assert wan_lab.engine.report(compiled)["calls"]["compiled"] - before == decoder


@pytest.mark.slow
def test_a_call_that_a_graph_declines_is_the_hosts_norm_and_silu(
    wan_lab: Lab, plain: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = vars(compiled)["warmgraph"].session.scope
    graph = next(k.graph for k in scope.kinds if k.label == f"Wan VAE norm {DIM}")
    served: list[bool] = []

    def every_other(arguments: list[Any]) -> Any:
        served.append(len(served) % 2 == 0)
        if not served[-1]:
            raise torch.OutOfMemoryError("no room")
        return call(arguments)

    monkeypatch.setattr(graph, "status", graph.status)  # which others share, and get back
    call = call_instead(graph, every_other)
    samples = latent(3, 4, 4)
    assert relative(compiled.decode(samples), plain.decode(samples)) < DECODED
    assert True in served and False in served
    reasons = {entry["reason"] for entry in wan_lab.engine.report(compiled)["eager"]}
    assert reasons == {"out of memory in compiled code; ComfyUI's own ran this call"}


@pytest.mark.slow
def test_another_nodes_patch_of_a_silu_leaves_its_norm_to_the_host(
    wan_lab: Lab, plain: Any, compiled: Any
) -> None:
    act = plain.first_stage_model.decoder.middle[0].residual[1]
    hook = act.register_forward_hook(lambda module, given, result: result * 0.5)
    try:
        samples = latent(2, 3, 4)
        assert relative(compiled.decode(samples), plain.decode(samples)) < DECODED
        [entry] = wan_lab.engine.report(compiled)["eager"]
        assert entry["reason"] == "another node hooks a SiLU"
    finally:
        hook.remove()
    compiled.decode(latent(1, 2, 2))
    assert wan_lab.engine.report(compiled)["regions"]["eager"] == 0


@pytest.mark.slow
def test_only_the_decoder(wan_lab: Lab, plain: Any) -> None:
    vae = wan_lab.engine.compile_vae(plain, parts="decoder", when_missing="wait")
    samples, frames = latent(2, 3, 4), video(5, 16, 16)
    assert relative(vae.decode(samples), plain.decode(samples)) < DECODED
    before = wan_lab.engine.report(vae)["calls"]
    assert torch.equal(vae.encode(frames), plain.encode(frames))
    assert wan_lab.engine.report(vae)["calls"] == before


@pytest.mark.slow
def test_wan_22_runs_compiled_by_the_same_plan(wan_lab: Lab) -> None:
    plain = make_wan22()
    vae = wan_lab.engine.compile_vae(plain, when_missing="wait")
    for frames in (1, 2, 3):
        samples = latent(frames, 2, 3, channels=48)
        assert relative(vae.decode(samples), plain.decode(samples)) < DECODED
        pixels = video(4 * frames - 3, 32, 48)
        assert relative(vae.encode(pixels), plain.encode(pixels)) < DECODED
    report = wan_lab.engine.report(vae)
    assert report["regions"]["eager"] == 0, report["eager"]
    assert report["regions"]["total"] + report["idle"] == 53  # the other half did not run last


def test_a_video_vae_without_a_plan_runs_eager_and_is_named(wan_lab: Lab) -> None:
    import comfy.sd
    from comfy.taesd.taehv import TAEHV

    plain = comfy.sd.VAE(sd=random_weights(TAEHV(latent_channels=16)))
    assert type(plain.first_stage_model) is TAEHV
    vae = wan_lab.engine.compile_vae(plain, when_missing="wait")
    assert wan_lab.engine.report(vae)["notes"] == [
        "no region plan for TAEHV yet: runs at normal speed"
    ]
    samples = latent(2, 2, 3)
    assert torch.equal(vae.decode(samples), plain.decode(samples))
