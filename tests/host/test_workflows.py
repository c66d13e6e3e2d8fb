"""Every shipped workflow, as it is, on a real server; only `steps` is lowered, and the size where
a run is there for its builds alone.

Narrow models stand under the file names that the workflows ask for. Seeds change from run to run,
as the page's "randomize" does, because the host would serve an equal prompt from its cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from warmgraph_tools.convert import to_prompt
from warmgraph_tools.host import Graph, Run, Server

FOLDER = Path(__file__).parents[2] / "workflows"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
FILES = {  # file name -> kind of model, and the model that it is for
    "sd_xl_base_1.0.safetensors": ("narrowxl", None),
    "sd_xl_offset_example-lora_1.0.safetensors": ("lora", "narrowxl"),
    "diffusers_xl_canny_full.safetensors": ("controlnet", "narrowxl"),
}
# Graphs that a workflow adds to text_to_image's: the hint block's, TAESD's block's.
ADDED = {"controlnet": 1, "vae_tiled_decode": 1}
STEPS = 2
OURS = (
    "WarmgraphCompileModel",
    "WarmgraphLoadCompiledGraph",
    "WarmgraphCompileControlNet",
    "WarmgraphCompileVAE",
)


class Stage:
    """A server with the named files, where text_to_image was saved, run and built."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.object_info = server.object_info()
        self.keys: set[str] = set()  # of all graphs that the workflows have had
        self._seed = 0

    def workflow(self, name: str) -> dict[str, Any]:
        return dict(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))

    def prompt(
        self, name: str, *, seed: int, eager: bool = False, size: int | None = None
    ) -> Graph:
        workflow = self.workflow(name)
        for node in workflow["nodes"]:
            if size is not None and node["type"] == "EmptyLatentImage":
                node["widgets_values"][:2] = [size, size]
            if node["type"] == "KSampler":
                node["widgets_values"][0] = seed
                node["widgets_values"][2] = STEPS
            elif eager and node["type"] in OURS:
                node["mode"] = 4  # bypassed
            elif eager and node["type"] == "WarmgraphGraphReport":
                node["mode"] = 2  # muted
        return to_prompt(workflow, self.object_info)

    def run(self, name: str, *, path: str | None = None) -> dict[str, Any]:
        """Run a workflow with and without our nodes on one new seed, and compare the pictures.

        Returns the model's report as it was when our run had ended.
        """
        return self.run_all(name, path=path)[0]

    def run_all(self, name: str, *, path: str | None = None) -> list[dict[str, Any]]:
        """As `run`; returns the reports of all that our nodes attached to, the model's first."""
        self._seed += 1
        workflow = self.workflow(name)
        if path:  # what our page script adds to a saved workflow's prompt
            workflow["extra"]["warmgraph"] = {"path": path, "user": "default"}
        ours = self.server.run(self.prompt(name, seed=self._seed), workflow=workflow)
        reports = self.server.model_reports(ours)
        reports.sort(key=lambda report: not report["id"].startswith("model-"))
        self.keys.update(kind["key"] for report in reports for kind in report["kinds"])
        texts = [ui["text"][0] for ui in ours.outputs.values() if "text" in ui]
        assert any("regions compiled" in text for text in texts)  # Graph Report
        eager = self.server.run(self.prompt(name, seed=self._seed, eager=True))
        self.assert_same_picture(ours, eager)
        return reports

    def pixels(self, run: Run) -> numpy.ndarray[Any, Any]:
        (file,) = self.server.files(run)
        return numpy.asarray(Image.open(file)).astype(numpy.int16)

    def assert_same_picture(self, ours: Run, eager: Run) -> None:
        a, b = self.pixels(ours), self.pixels(eager)
        assert a.shape == b.shape
        assert b.std() > 10  # something to see
        distance = numpy.abs(a - b)
        assert distance.max() <= 3 and distance.mean() < 0.1  # of 255, both rounded to 8 bits


@pytest.fixture(scope="module")
def stage(start_server: Callable[..., Server], place_model: Callable[..., str]) -> Stage:
    """One server with the named files; text_to_image saved, run, everything built: here, or earlier
    in this run of the suite for the same model.
    """
    server = start_server(lend=0)
    server.request("/warmgraph/settings", {"idle_s": 600})  # workers start once
    for name, (kind, base) in FILES.items():
        place_model(server, kind, name=name, base=base)
    stage = Stage(server)
    path = server.save_workflow("text_to_image", stage.workflow("text_to_image"))
    stage.run("text_to_image", path=path)  # eager where graphs are missing, the builds behind it
    server.wait_until_built()
    return stage


def test_the_server_imports_the_pack_without_a_complaint(stage: Stage) -> None:
    assert "IMPORT FAILED" not in stage.server.log
    assert set(OURS) <= set(stage.object_info)


def test_each_workflow_names_only_files_that_this_test_provides() -> None:
    for name in NAMES:
        workflow = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        asked = {
            model["name"]
            for node in workflow["nodes"]
            for model in node["properties"].get("models", [])
        }
        assert asked and asked <= set(FILES), name


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_workflow_runs_compiled_and_builds_nothing_more(stage: Stage, name: str) -> None:
    before = len(stage.keys)
    if name in ADDED:
        small = stage.prompt(name, seed=0, size=256)  # graphs are for any size
        stage.server.run(small, workflow=stage.workflow(name))
        stage.server.wait_until_built()
    reports = stage.run_all(name)
    for report in reports:
        assert report["regions"]["eager"] == 0, report["eager"]
        assert report["regions"]["compiled"] > 10 and report["misses"] == []
    assert len(stage.keys) == before + ADDED.get(name, 0)
    assert stage.server.report()["store"]["files"] == len(stage.keys)


def test_text_to_image_left_its_graphs_beside_the_saved_workflow(stage: Stage) -> None:
    workflows = stage.server.base / "user" / "default" / "workflows"
    graphs = list((workflows / "text_to_image.graphs").glob(".*.safetensors"))
    listed = stage.server.get("/userdata?dir=workflows&recurse=true")
    assert len(graphs) > 5
    assert listed == ["text_to_image.json"]


def test_after_a_restart_text_to_image_and_load_compiled_graph_build_nothing(stage: Stage) -> None:
    stage.server.restart()
    first = stage.run("load_compiled_graph")
    assert (first["builds"], first["reused"]) == (0, 0) and first["loads"] == len(first["kinds"])
    second = stage.run("text_to_image")  # in the same process: what the first loaded is there
    assert (second["builds"], second["loads"]) == (0, 0)
    assert second["reused"] == len(second["kinds"])
    for report in (first, second):
        assert report["regions"]["eager"] == 0, report["eager"]
