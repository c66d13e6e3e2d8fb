"""Compile VAE on the real host: any size, tiles, batch and restart with no build, and undone."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.errors import StrictError
from warmgraph_backends.runtime.attributes import Attributes
from warmgraph_tools.inprocess import Host

from .blocks import check_blocks
from .elsewhere import block_classes, check_one_more_argument
from .lab import Lab, call_instead, lab_of_its_own, relative
from .others import Counting
from .rows import some_rows

DECODED = 1e-5
DDCONFIG = {
    "double_z": True,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 64,
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "dropout": 0.0,
}
SIZES = [(8, 8), (16, 8), (9, 15), (25, 33), (32, 32), (45, 60), (8, 64), (64, 8), (1, 1), (2, 3)]


def make_vae(seed: int = 0, channels: int = 4, widths: tuple[int, ...] = (1, 1)) -> Any:
    """A small VAE of the host's, with random weights.

    Args:
        channels: of a latent.
        widths: of its levels; each but the last doubles an image's sides.
    """
    import comfy.sd
    from comfy.ldm.models.autoencoder import AutoencoderKL

    levels = {"z_channels": channels, "ch_mult": list(widths)}
    config = {"embed_dim": channels, "ddconfig": {**DDCONFIG, **levels}}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in AutoencoderKL(**config).state_dict().items():
        if tensor.dim() > 1:
            fan_in = tensor[0].numel()
            weights[name] = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
        else:
            weights[name] = torch.full_like(tensor, float("norm" in name and "weight" in name))
    vae = comfy.sd.VAE(sd=weights, config={"params": config})
    vae.upscale_ratio = vae.downscale_ratio = 2 ** (len(widths) - 1)
    return vae


def latent(height: int, width: int, batch: int = 1, seed: int = 3) -> torch.Tensor:
    return torch.randn(batch, 4, height, width, generator=torch.Generator().manual_seed(seed))


def pixels(height: int, width: int, batch: int = 1) -> torch.Tensor:
    return torch.rand(batch, height, width, 3, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def vae_lab(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """An engine that builds a VAE's graphs once for this module."""
    yield from lab_of_its_own("vae", tmp_path_factory)


@pytest.fixture(scope="module")
def plain(host: Host) -> Any:
    return make_vae()


@pytest.fixture(scope="module")
def compiled(vae_lab: Lab, plain: Any) -> Any:
    """The compiled copy, its graphs built or loaded, and every region once compared with eager."""
    with torch.inference_mode():
        vae = vae_lab.engine.compile_vae(plain, when_missing="wait")
        vae.decode(latent(4, 4))
        vae.encode(pixels(32, 32))
    report = vae_lab.engine.report(vae)
    assert report["regions"]["eager"] == 0, report["eager"]
    return vae


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("batch", some_rows([1, 3], [3]))
def test_every_size_decodes_as_eager_with_no_build(
    vae_lab: Lab, plain: Any, compiled: Any, size: tuple[int, int], batch: int
) -> None:
    builds = vae_lab.builds()
    samples = latent(*size, batch)
    assert relative(compiled.decode(samples), plain.decode(samples)) < DECODED
    report = vae_lab.engine.report(compiled)
    assert vae_lab.builds() == builds and report["regions"]["eager"] == 0, report["eager"]


def test_the_half_that_a_prompt_has_no_use_for_is_no_failure(vae_lab: Lab, compiled: Any) -> None:
    compiled.decode(latent(4, 4))
    report = vae_lab.engine.report(compiled)
    decoder, encoder = report["regions"]["compiled"], report["idle"]
    assert decoder > 0 and encoder > 0 and report["ready"] == report["regions"]["eager"] == 0
    said = [line["text"] for line in report["lines"]]
    assert any(each.endswith(f"{decoder} of {decoder} parts compiled") for each in said), said
    assert f"{encoder} compiled parts were not called in the last run" in report["text"]
    compiled.encode(pixels(32, 32))
    report = vae_lab.engine.report(compiled)
    assert (report["regions"]["compiled"], report["idle"]) == (encoder, decoder)


@pytest.mark.parametrize("size", [(64, 64), (128, 72), (200, 264), (16, 16)], ids=str)
def test_every_size_encodes_as_eager_with_no_build(
    vae_lab: Lab, plain: Any, compiled: Any, size: tuple[int, int]
) -> None:
    builds = vae_lab.builds()
    image = pixels(*size, 2)
    assert relative(compiled.encode(image), plain.encode(image)) < DECODED
    assert vae_lab.builds() == builds


def test_blocks_leave_what_they_are_given_and_a_newer_hosts_argument_ends_no_prompt(
    vae_lab: Lab, plain: Any, compiled: Any
) -> None:
    """Of one class at a time they are the host's on a host that gives them one argument more."""
    session = vars(compiled)["warmgraph"].session
    builds = vae_lab.builds()

    def decode(vae: Any = plain) -> torch.Tensor:
        return vae.decode(latent(4, 4))

    def encode(vae: Any = plain) -> torch.Tensor:
        return vae.encode(pixels(32, 32))

    assert check_blocks(session.scope, lambda: (decode(), encode())) == set()
    classes = block_classes(session)
    down = {cls for cls in classes if cls.__name__ == "Downsample"}
    for run, some in ((decode, classes - down), (encode, down)):

        def check(vae: Any, run: Callable[..., torch.Tensor] = run) -> None:
            assert relative(run(vae), run()) < DECODED

        def again() -> Any:
            return vae_lab.engine.compile_vae(plain, when_missing="wait")

        check_one_more_argument(some, again, check, vae_lab.engine.report)
        check(vae := again())
        assert vae_lab.engine.report(vae)["regions"]["eager"] == 0
    assert vae_lab.builds() == builds


def test_tiles_are_just_sizes(vae_lab: Lab, plain: Any, compiled: Any) -> None:
    builds = vae_lab.builds()
    samples, image = latent(48, 40), pixels(192, 160)
    tiles = {"tile_x": 32, "tile_y": 24, "overlap": 8}
    ours = compiled.decode_tiled(samples, **tiles)
    assert relative(ours, plain.decode_tiled(samples, **tiles)) < DECODED
    tiles = {"tile_x": 96, "tile_y": 128, "overlap": 32}
    ours = compiled.encode_tiled(image, **tiles)
    assert relative(ours, plain.encode_tiled(image, **tiles)) < DECODED
    assert vae_lab.builds() == builds


def test_calls_are_served_by_graphs(vae_lab: Lab, compiled: Any) -> None:
    before = vae_lab.engine.report(compiled)["calls"]["compiled"]
    compiled.decode(latent(8, 8))
    decoder = [k for k in vae_lab.engine.report(compiled)["kinds"] if k["state"] == "ready"]
    assert decoder
    assert vae_lab.engine.report(compiled)["calls"]["compiled"] - before == 12


def test_a_vae_that_is_as_before_is_not_looked_through_again(
    vae_lab: Lab, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes milliseconds, which a small decode does not have."""
    latent = torch.zeros(1, 4, 8, 8)
    compiled.decode(latent)
    scans = []
    scan = Attributes._scan
    monkeypatch.setattr(Attributes, "_scan", lambda self: scans.append(1) or scan(self))
    compiled.decode(latent)
    assert not scans


def test_a_block_that_changes_its_width_is_compiled(vae_lab: Lab) -> None:
    """It has a convolution more, on its shortcut; of this VAE nothing else is built."""
    plain = make_vae(widths=(1, 2))
    vae = vae_lab.engine.compile_vae(plain, parts="decoder", when_missing="never")
    session = vars(vae)["warmgraph"].session
    (graph,) = vae_lab.build_only(session, ["VAE ResnetBlock 128->64"])
    for samples in (latent(4, 4), latent(9, 5, batch=2)):
        before = vae_lab.engine.report(vae)["calls"]["compiled"]
        assert relative(vae.decode(samples), plain.decode(samples)) < DECODED
        assert vae_lab.engine.report(vae)["calls"]["compiled"] > before
    (kind,) = (k for k in vae_lab.engine.report(vae)["kinds"] if k["key"] == graph.key)
    assert (kind["state"], kind["places"]) == ("ready", 1)


def test_a_new_process_builds_nothing(
    vae_lab: Lab, plain: Any, compiled: Any, tmp_path: Path
) -> None:
    fresh = vae_lab.copy_to(tmp_path)
    try:
        vae = fresh.engine.compile_vae(make_vae(seed=1), when_missing="wait")
        vae.decode(latent(5, 7))
        report = fresh.engine.report(vae)
        assert (fresh.builds(), report["regions"]["eager"]) == (0, 0)
        assert report["loads"] == len(report["kinds"])
    finally:
        fresh.engine.close()


def test_the_vae_that_came_in_is_as_it_was(vae_lab: Lab, plain: Any, compiled: Any) -> None:
    import comfy.sd

    samples = latent(8, 8)
    before = dict(vars(plain))
    eager = plain.decode(samples)
    compiled.decode(samples)
    assert vars(plain) == before and type(plain) is comfy.sd.VAE
    assert isinstance(compiled, comfy.sd.VAE) and type(compiled).__name__ == "VAE"
    assert compiled.first_stage_model is plain.first_stage_model
    assert torch.equal(plain.decode(samples), eager)
    assert left_behind(plain.first_stage_model) == []


def test_two_vaes_through_one_node_and_two_nodes_in_a_row(vae_lab: Lab, plain: Any) -> None:
    other = make_vae(seed=9)
    one, two = (vae_lab.engine.compile_vae(v, when_missing="wait") for v in (plain, other))
    again = vae_lab.engine.compile_vae(one, when_missing="wait")
    samples = latent(6, 10)
    for ours, theirs in ((one, plain), (two, other), (again, plain)):
        assert relative(ours.decode(samples), theirs.decode(samples)) < DECODED
    assert vae_lab.engine.report(again)["id"] != vae_lab.engine.report(one)["id"]


def test_copies_of_the_copy(vae_lab: Lab, plain: Any, compiled: Any) -> None:
    samples = latent(6, 10)
    eager = plain.decode(samples)
    for duplicate in (copy.copy(compiled), copy.deepcopy(compiled)):
        assert relative(duplicate.decode(samples), eager) < DECODED


def test_only_the_decoder(vae_lab: Lab, plain: Any) -> None:
    vae = vae_lab.engine.compile_vae(plain, parts="decoder", when_missing="wait")
    assert relative(vae.decode(latent(6, 10)), plain.decode(latent(6, 10))) < DECODED
    before = vae_lab.engine.report(vae)
    vae.encode(pixels(64, 64))
    after = vae_lab.engine.report(vae)
    assert after["calls"] == before["calls"] and after["regions"]["eager"] == 0


def test_strict_loads_a_decoders_folder_for_the_decoder_alone(
    vae_lab: Lab, plain: Any, compiled: Any, tmp_path: Path
) -> None:
    name = "decoders"
    decoder = vae_lab.engine.compile_vae(plain, parts="decoder", when_missing="wait", graphs=name)
    decoder.decode(latent(4, 4))
    vae_lab.settle()
    fresh = vae_lab.copy_to(tmp_path)
    shutil.rmtree(fresh.store)
    shutil.copytree(vae_lab.workflows / f"{name}.graphs", fresh.workflows / f"{name}.graphs")
    try:
        load = fresh.engine.load_vae_graphs
        vae = load(make_vae(seed=2), name, parts="decoder", strict=True)
        before = fresh.engine.report(vae)
        vae.decode(latent(6, 10))
        report = fresh.engine.report(vae)
        assert report["regions"]["eager"] == 0, report["eager"]
        assert (
            report["calls"]["compiled"] - before["calls"]["compiled"] == report["regions"]["total"]
        )
        for parts in ("decoder and encoder", "encoder"):
            with pytest.raises(StrictError, match="no compiled graph") as refusal:
                load(plain, name, parts=parts, strict=True)
            assert name in str(refusal.value)
        assert fresh.jobs() == 0
    finally:
        fresh.engine.close()


def test_memory_that_runs_out_ends_in_the_hosts_tiles(
    vae_lab: Lab, plain: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = plain.first_stage_model.decoder.up[0].block[0]
    limited = _Limited(block.conv1.forward, most=70 * 70 * 4 * 64)
    monkeypatch.setattr(block.conv1, "forward", limited)
    samples = latent(72, 72)
    eager = plain.decode(samples)
    assert limited.refused
    limited.refused = False
    ours = compiled.decode(samples)
    assert limited.refused and relative(ours, eager) < DECODED
    assert left_behind(plain.first_stage_model, but=block.conv1) == []


def test_memory_that_runs_out_in_a_graph_is_the_hosts_call(
    vae_lab: Lab, plain: Any, compiled: Any
) -> None:
    scope = vars(compiled)["warmgraph"].session.scope
    graph = next(k.graph for k in scope.kinds if k.label == "VAE ResnetBlock 64->64")

    def short(_arguments: list[Any]) -> Any:
        raise torch.OutOfMemoryError("no room")

    own = call_instead(graph, short)
    samples = latent(8, 8)
    try:
        assert relative(compiled.decode(samples), plain.decode(samples)) < DECODED
    finally:
        call_instead(graph, own)
    reasons = [entry["reason"] for entry in vae_lab.engine.report(compiled)["eager"]]
    assert reasons == ["out of memory in compiled code; ComfyUI's own ran this call"]


def test_large_activations_are_compared_on_a_corner(
    vae_lab: Lab, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warmgraph_backends.runtime import verifier

    monkeypatch.setattr(verifier, "MAX_COMPARED", 1 << 14)
    fresh = vae_lab.copy_to(tmp_path)
    try:
        vae = fresh.engine.compile_vae(plain, when_missing="wait")
        assert relative(vae.decode(latent(9, 15)), plain.decode(latent(9, 15))) < DECODED
        assert fresh.engine.report(vae)["regions"]["eager"] == 0
    finally:
        fresh.engine.close()


def test_another_nodes_patch_of_a_block_is_named(vae_lab: Lab, plain: Any, compiled: Any) -> None:
    block = plain.first_stage_model.decoder.mid.block_1
    host = block.forward
    block.forward = lambda *args, **kwargs: host(*args, **kwargs) * 0.5
    try:
        samples = latent(6, 6)
        assert relative(compiled.decode(samples), plain.decode(samples)) < DECODED
        [entry] = vae_lab.engine.report(compiled)["eager"]
        assert entry["reason"] == "another node replaces the forward of a ResnetBlock"
    finally:
        del block.forward


def test_others_code_in_a_block_is_called_in_the_order_of_eager(
    vae_lab: Lab, plain: Any, compiled: Any
) -> None:
    block, counting = plain.first_stage_model.decoder.mid.block_1, Counting()
    parts = {name: getattr(block, name) for name in ("conv2", "norm1", "conv1")}
    samples = latent(6, 6)
    unchanged = plain.decode(samples)
    for name, part in parts.items():
        part.forward = counting.around(name, part.forward)
    try:
        compiled.decode(samples)
        vae_lab.wait_until(lambda: not vae_lab.engine._graphs.awaited())
        compiled.decode(samples)  # compared with the host's maths
        found = []
        for vae in (compiled, plain):
            counting.begin()
            found.append((vae.decode(samples), list(counting.calls)))
        (ours, calls), (eager, expected) = found
        assert calls == expected == ["norm1", "conv1", "conv2"]
        assert relative(ours, eager) < DECODED < relative(eager, unchanged)
        assert vae_lab.engine.report(compiled)["regions"]["eager"] == 0
    finally:
        for part in parts.values():
            del part.forward


def test_what_cannot_be_compiled_is_said(vae_lab: Lab) -> None:
    import comfy.sd

    nothing = comfy.sd.VAE(sd={"unknown.weight": torch.zeros(1)})
    vae = vae_lab.engine.compile_vae(nothing, when_missing="wait")
    assert vae_lab.engine.report(vae)["notes"] == ["this VAE has no weights: runs at normal speed"]
    with pytest.raises(StrictError, match="no weights"):
        vae_lab.engine.load_vae_graphs(nothing, "nothing", strict=True)


@pytest.mark.parametrize("thing", [None, "vae.safetensors", torch.nn.Linear(2, 2)])
def test_what_is_no_vae_is_refused_in_words(vae_lab: Lab, thing: Any) -> None:
    with pytest.raises(
        TypeError, match=f"vae must be a VAE of the host, got a {type(thing).__name__}"
    ):
        vae_lab.engine.compile_vae(thing)


def test_parts_must_be_one_of_three(vae_lab: Lab, plain: Any) -> None:
    with pytest.raises(ValueError, match=r"parts must be one of .*, got 'both'"):
        vae_lab.engine.compile_vae(plain, parts="both")


def test_a_run_that_cannot_begin_is_the_hosts_until_the_vae_is_loaded_anew(
    vae_lab: Lab, host: Host, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = vae_lab.engine.compile_vae(plain, when_missing="wait")
    scope = vars(vae)["warmgraph"].session.scope
    samples = latent(6, 6)

    def fail() -> None:
        raise RuntimeError("no plan today")

    with monkeypatch.context() as patch:
        patch.setattr(scope, "begin_run", fail)
        assert torch.equal(vae.decode(samples), plain.decode(samples))
    assert "no plan today" in vae_lab.engine.report(vae)["notes"][0]
    before, eager = scope.compiled_calls, plain.decode(samples)
    assert torch.equal(vae.decode(samples), eager)  # not tried again
    assert scope.compiled_calls == before
    host.unload()
    assert relative(vae.decode(samples), eager) < DECODED
    assert scope.compiled_calls > before and vae_lab.engine._prompts.sampling == 0


def left_behind(root: torch.nn.Module, but: torch.nn.Module | None = None) -> list[str]:
    """Names of modules that have a forward, decode or encode of their own."""
    ours = ("forward", "decode", "encode")
    return [
        name
        for name, module in root.named_modules()
        if module is not but and any(key in vars(module) for key in ours)
    ]


class _Limited:
    """A forward that has no room for large inputs."""

    def __init__(self, host: Callable[..., torch.Tensor], most: int) -> None:
        self._host, self._most = host, most
        self.refused = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > self._most:
            self.refused = True
            raise torch.OutOfMemoryError("no room")
        return self._host(x)
