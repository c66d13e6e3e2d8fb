"""The two small trained transformers: their files, and what Step Cache does to their images.

The bars hold for the shipped weights. Each is against the run that computes every step; work is
equal: 12 of 24 steps unless a test says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from warmgraph_tools.flow_denoiser import quality
from warmgraph_tools.flow_denoiser.data import SORTS
from warmgraph_tools.flow_denoiser.quality import Bench, Model, Task
from warmgraph_tools.inprocess import Host

from .rows import some_rows

#: EasyCache's thresholds at which it computes one step in so many, by model, sampler and number, as
#: `quality` found them.
EASYCACHE = {
    ("digits", "euler", 2.0): 0.1094,
    ("digits", "dpmpp_2m", 2.0): 0.1108,
    ("digits", "er_sde", 2.0): 0.5694,
    ("digits", "euler_ancestral", 2.0): 0.9991,
    ("emoji", "euler", 1.8): 0.118,
    ("emoji", "dpmpp_2m", 1.8): 0.1225,
    ("emoji", "er_sde", 1.8): 0.3964,
    ("emoji", "euler_ancestral", 1.8): 1.0117,
    ("emoji", "euler", 2.4): 0.4326,
    ("emoji", "dpmpp_2m", 2.4): 0.4326,
    ("emoji", "er_sde", 2.4): 1.1042,
    ("emoji", "euler_ancestral", 2.4): 2.279,
}


@pytest.fixture(scope="module")
def model(host: Host) -> Callable[[str], Model]:
    """Loads a shipped model by its name, once."""
    loaded: dict[str, Model] = {}

    def load(name: str) -> Model:
        if name not in loaded:
            loaded[name] = Model.load(name)
        return loaded[name]

    return load


@pytest.mark.parametrize("name", SORTS)
def test_the_host_knows_the_files_as_ours(model: Callable[[str], Model], name: str) -> None:
    from warmgraph_tools.flow_denoiser import arch

    sort, loaded = SORTS[name], model(name).patcher.model
    assert (quality.HERE / f"{name}.safetensors").stat().st_size <= 8e6
    assert type(loaded.model_config) is arch.CLASSES[sort]
    net = loaded.diffusion_model
    assert (net.in_channels, net.patch_size) == (sort.channels, arch.CLASSES[sort].patch_size)
    assert len(net.layers) == arch.CLASSES[sort].layers


def test_all_steps_computed_is_the_plain_image(model: Callable[[str], Model]) -> None:
    bench = Bench(model("digits"), Task(steps=10, seeds=(1,)))
    assert bench.plain.pictures.isfinite().all() and bench.plain.pictures.std() > 0.2
    every = bench.step_cache(1.0, "auto").row
    assert (every.psnr, every.ssim, every.work) == (math.inf, 1.0, 1.0)


@pytest.mark.parametrize("sampler", some_rows(["euler", "dpmpp_2m"], ["euler"]))
def test_digits_are_closer_than_by_easycache_and_by_fewer_steps(
    model: Callable[[str], Model], sampler: str
) -> None:
    bench = Bench(model("digits"), Task("digits", sampler, seeds=(1,)))
    fewer = bench.fewer_steps(2.0).row
    easy = bench.easycache(2.0, EASYCACHE["digits", sampler, 2.0]).row
    found = {each: bench.step_cache(2.0, each).row for each in ("auto", "half", "line")}
    assert {row.work for row in (fewer, easy, *found.values())} == {0.5}
    assert found["half"].psnr >= 43 and found["line"].psnr >= 48
    assert found["auto"].psnr >= found["half"].psnr
    for row in found.values():
        assert row.psnr >= easy.psnr + 3 and row.psnr >= fewer.psnr + 6


@pytest.mark.parametrize("sampler", some_rows(["er_sde", "euler_ancestral"], ["er_sde"]))
def test_digits_of_samplers_that_add_noise_are_no_worse_than_by_easycache(
    model: Callable[[str], Model], sampler: str
) -> None:
    bench = Bench(model("digits"), Task("digits", sampler, seeds=(1,)))
    easy = bench.easycache(2.0, EASYCACHE["digits", sampler, 2.0]).row
    ours = bench.step_cache(2.0, "auto").row
    assert ours.work == easy.work == 0.5 and ours.psnr >= easy.psnr


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "er_sde", "euler_ancestral"])
def test_emoji_are_no_worse_than_by_easycache_and_by_fewer_steps(
    model: Callable[[str], Model], sampler: str
) -> None:
    bench = Bench(model("emoji"), Task("emoji", sampler, seeds=(1,)))
    for speed in (1.8, 2.4):
        easy = bench.easycache(speed, EASYCACHE["emoji", sampler, speed]).row
        ours = bench.step_cache(speed, "auto").row
        assert ours.work == easy.work and ours.psnr >= easy.psnr
        assert ours.psnr >= bench.fewer_steps(speed).row.psnr - 0.5
