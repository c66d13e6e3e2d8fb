"""The shipped workflows of diffusion transformers, on a real server; steps and sizes are lowered.

Small models with random weights stand under the file names that the workflows ask for: whole ones,
with text encoders and VAEs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from warmgraph_tools import transformer_files
from warmgraph_tools.host import Run, Server
from warmgraph_tools.inprocess import Host
from warmgraph_tools.templates import read

from .stage import NAMES, OURS, Stage, asked, nodes

#: The workflows, and how many models and VAEs each compiles.
COMPILED = {
    name: sum(node["type"] in OURS for node in nodes(name))
    for name in NAMES
    if asked(name) <= set(transformer_files.FILES)
}
#: One is in every run; the engine's tests show quantised files and other families.
QUICK = ("z_image_turbo",)
#: Where a video needs less, or several frames.
SMALLER = {
    "minimax_h3_image_to_video": {"width": 64, "height": 64},
    "ltx23_image_to_video": {"width": 64, "height": 64, "length": 9, "frames_number": 9},
}


@pytest.fixture(scope="module")
def stage(
    start_server: Callable[..., Server],
    pass_transformers: Callable[..., None],
    tmp_path_factory: pytest.TempPathFactory,
    host: Host,
) -> Iterator[Stage]:
    base = tmp_path_factory.mktemp("base")
    pass_transformers(base)
    server = start_server(base)
    pass_transformers(base, back=True)  # the key, for those that come now
    server.request("/warmgraph/settings", {"idle_s": 600, "workers": 1})  # which starts once
    small = {"width": 256, "height": 256, "length": 5, "megapixels": 0.07}
    yield Stage(server, **small, lossless=True)
    pass_transformers(base, back=True)


def place_files(stage: Stage, name: str) -> None:
    """Write what a workflow asks for, unless an earlier one did."""
    for file in asked(name):
        transformer_files.ensure(stage.server.base / "models", file)


def test_each_file_is_asked_for() -> None:
    assert set().union(*map(asked, COMPILED)) == set(transformer_files.FILES)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in COMPILED]
)
def test_a_workflow_runs_compiled_once_built_and_builds_nothing_more(
    stage: Stage, name: str
) -> None:
    """Of int8 products the last bit of an input may move a whole step of their format: eager's own
    image of the small Z-Image moves by 2e-3 for 1e-7.
    """
    place_files(stage, name)
    size = SMALLER.get(name, {})
    stage.server.run(stage.prompt(name, seed=0, **size), workflow=read(name))  # builds behind it
    built = stage.server.wait_until_built()["store"]["files"]
    is_int8 = any("int8" in file for file in asked(name))
    reports = stage.run_all(name, within=(16, 1.0) if is_int8 else (3, 0.1), **size)
    for report in reports:
        assert report["regions"]["eager"] == 0, report["eager"]
        assert report["regions"]["compiled"] > 0 and report["misses"] == []
    assert stage.server.report()["store"]["files"] == built
    assert len(reports) == COMPILED[name]
    graphs = [
        {kind["key"] for kind in report["kinds"]}
        for report in reports
        if report["id"].startswith("model-")
    ]
    assert graphs.count(graphs[0]) == len(graphs)  # the same ones, where there are two models


@pytest.mark.parametrize(
    ("name", "blocks", "shape"),
    [
        ("ltx23_image_to_video", 2, (9, 128, 128, 3)),  # twice the first pass's sides
        ("minimax_h3_image_to_video", 2, (5, 64, 64, 3)),
    ],
)
def test_a_workflow_of_video_and_sound_runs_as_the_host_has_it_where_nothing_is_built(
    stage: Stage, name: str, blocks: int, shape: tuple[int, ...]
) -> None:
    """Their blocks take minutes to build; what else the workflows do is in every run."""
    place_files(stage, name)
    before = stage.server.report()["store"]["files"]
    prompt = stage.prompt(name, seed=7, when_missing="never", **SMALLER[name])
    run = stage.server.run(prompt, workflow=read(name))
    totals = [report["regions"]["total"] for report in stage.server.model_reports(run)]
    assert len(totals) == COMPILED[name] and min(totals) == blocks
    assert stage.server.report()["store"]["files"] == before
    video, sound = stage.pixels(run), stage.sound(run)
    assert video.shape == shape and video.std() > 10
    assert sound is not None and sound.std() > 1e-3 and stage.film(run) == (shape[0], 1)


def test_step_cache_is_compared_with_every_step_computed(stage: Stage) -> None:
    """By the host's own images and by the report; with no step left out both are equal."""
    name = "step_cache_compare"
    place_files(stage, name)

    def run(seed: int, **values: float) -> tuple[Run, list[str]]:
        prompt = stage.prompt(name, seed=seed, when_missing="never", **values)
        for node in prompt.values():
            if "steps" in node["inputs"]:
                node["inputs"]["steps"] = 24
        done = stage.server.run(prompt, workflow=read(name))
        (text,) = (ui["text"][0] for ui in done.outputs.values() if "text" in ui)
        return done, text.splitlines()

    compared, said = run(7)
    assert stage.pixels(compared).std() > 10
    shown = [len(ui["images"]) for ui in compared.outputs.values() if "images" in ui]
    assert shown == [1, 1], "with Step Cache and without, side by side"
    (computed,) = (line for line in said if line.startswith("Step Cache"))
    told = r": 13 of 24 steps computed, 1\.8x; about \d+\.\d\d of \d+\.\d\d s saved"
    assert re.search(told, computed), said
    latents = re.fullmatch(r"latents: PSNR (\d+\.\d) dB, SSIM (0\.\d{4})", said[-1])
    assert latents is not None and float(latents[1]) > 15, said

    _, said = run(8, speed=1.0)  # both anew: what is compared in a first run is the host's
    assert "Step Cache: every step is computed, as without it" in said
    assert said[-1] == "latents: the same, bit for bit"
