"""Every shipped workflow of a UNet on a real server; only `steps` and the size are lowered.

Narrow models stand under the file names that the workflows ask for. Seeds change from run to run,
as the page's "randomize" does, because the host would serve an equal prompt from its cache.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from warmgraph_tools import transformer_files
from warmgraph_tools.host import Server
from warmgraph_tools.templates import read, title

from .stage import NAMES, OURS, Stage, asked

FILES = {  # file name -> kind of model, and the model that it is for
    "sd_xl_base_1.0.safetensors": ("narrowxl", None),
    "sd_xl_offset_example-lora_1.0.safetensors": ("lora", "narrowxl"),
    "diffusers_xl_canny_full.safetensors": ("controlnet", "narrowxl"),
}
# Graphs that a workflow adds to text_to_image's: the hint block's, TAESD's block's.
ADDED = {"controlnet": 1, "vae_tiled_decode": 1}
UNETS = [name for name in NAMES if asked(name) <= set(FILES)]
# Graphs are for any size. Of tiles there are still nine.
#: The name under which load_compiled_graph looks for what text_to_image has left.
FIRST = title("text_to_image")
SMALL = {"width": 256, "height": 256, "tile_size": 128}


@pytest.fixture(scope="module")
def stage(start_server: Callable[..., Server], place_model: Callable[..., str]) -> Stage:
    """One server with the named files; text_to_image saved, run, everything built: here, or earlier
    in this run of the suite for the same model.
    """
    server = start_server(lend=0)
    server.request("/warmgraph/settings", {"idle_s": 600, "workers": 1})  # which starts once
    for name, (kind, base) in FILES.items():
        place_model(server, kind, name=name, base=base)
    stage = Stage(server)
    path = server.save_workflow(FIRST, read("text_to_image"))
    stage.run("text_to_image", path=path, **SMALL)  # eager where graphs are missing
    server.wait_until_built()
    return stage


def test_the_server_imports_the_pack_without_a_complaint(stage: Stage) -> None:
    assert "IMPORT FAILED" not in stage.server.log
    assert set(OURS) <= set(stage.object_info)


def test_each_workflow_names_only_files_that_these_tests_provide() -> None:
    for name in NAMES:
        files = FILES if name in UNETS else transformer_files.FILES
        assert asked(name) and asked(name) <= set(files), name


#: Tests of the engine show all that these do.
SLOW = ("controlnet", "vae_tiled_decode")
AS_IT_IS = pytest.param("text_to_image", {}, id="text_to_image as it is", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(
            pytest.param(n, SMALL, id=n, marks=[pytest.mark.slow] if n in SLOW else [])
            for n in UNETS
        ),
        AS_IT_IS,
    ],
)
def test_a_shipped_workflow_runs_compiled_and_builds_nothing_more(
    stage: Stage, name: str, size: dict[str, int]
) -> None:
    before = len(stage.keys)
    if name in ADDED:
        small = stage.prompt(name, seed=0, **SMALL)
        stage.server.run(small, workflow=read(name))
        stage.server.wait_until_built()
    reports = stage.run_all(name, **size)
    for report in reports:
        assert report["regions"]["eager"] == 0, report["eager"]
        assert report["regions"]["compiled"] >= 10 and report["misses"] == []
        is_vae = report["id"].startswith("vae-")  # of which a workflow decodes or encodes
        assert (report["idle"] > 0) == is_vae, report["id"]
    assert len(stage.keys) == before + ADDED.get(name, 0)
    assert stage.server.report()["store"]["files"] == len(stage.keys)


def test_text_to_image_left_its_graphs_beside_the_saved_workflow(stage: Stage) -> None:
    workflows = stage.server.base / "user" / "default" / "workflows"
    graphs = list((workflows / f"{FIRST}.graphs").glob(".*.safetensors"))
    listed = stage.server.get("/userdata?dir=workflows&recurse=true")
    assert len(graphs) > 5
    assert listed == [f"{FIRST}.json"]


def test_after_a_restart_text_to_image_and_load_compiled_graph_build_nothing(stage: Stage) -> None:
    stage.server.restart()
    first = stage.run("load_compiled_graph", **SMALL)
    assert (first["builds"], first["reused"]) == (0, 0) and first["loads"] == len(first["kinds"])
    # In the same process: what the first loaded is there.
    second = stage.run("text_to_image", **SMALL)
    assert (second["builds"], second["loads"]) == (0, 0)
    assert second["reused"] == len(second["kinds"])
    for report in (first, second):
        assert report["regions"]["eager"] == 0, report["eager"]
