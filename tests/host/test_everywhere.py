"""The setting that compiles every model, on a real server and by API: no prompt names our nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from warmgraph_tools.host import Graph, HostError, Run, Server

from .test_server import small_prompt


class Place:
    """A server with the setting on, and a model whose compiled graphs are there."""

    def __init__(self, server: Server, checkpoint: str) -> None:
        self.server, self.checkpoint = server, checkpoint

    def prompt(self, *, seed: int = 1, steps: int = 2) -> Graph:
        return small_prompt(self.checkpoint, seed=seed, steps=steps)

    def latent(self, run: Run) -> torch.Tensor:
        (file,) = self.server.files(run, "latents")
        return load_file(file)["latent_tensor"]

    def switch(self, **settings: bool) -> None:
        self.server.post("/warmgraph/settings", settings)

    def report(self, run: Run) -> dict[str, Any]:
        """The report of the one model that a run was compiled for."""
        (report,) = self.server.model_reports(run)
        return report


@pytest.fixture(scope="module")
def place(start_server: Callable[..., Server], place_model: Callable[..., str]) -> Place:
    server = start_server(lend=0)
    server.request("/warmgraph/settings", {"idle_s": 600, "workers": 1})
    place = Place(server, place_model(server, "narrowxl"))
    with_node = place.prompt(seed=99)
    put_node(with_node)
    server.run(with_node)
    server.wait_until_built()
    return place


@pytest.fixture(autouse=True)
def _on_for_a_test(place: Place) -> Iterator[None]:
    place.switch(compile_all=True)
    yield
    place.switch(compile_all=False, compile_all_vaes=False)


def put_node(prompt: Graph, **inputs: Any) -> None:
    """Put Compile Model before the sampler, as a user does."""
    prompt["9"] = {
        "class_type": "WarmgraphCompileModel",
        "inputs": {"model": ["1", 0], "when_missing": "background", **inputs},
    }
    prompt["4"]["inputs"]["model"] = ["9", 0]


def test_a_prompt_without_our_nodes_runs_compiled_as_with_one(place: Place) -> None:
    run = place.server.run(place.prompt(seed=3))
    report = place.report(run)
    assert report["by"] == "setting"
    assert report["nodes"] == [{"workflow": None, "node": "4"}]
    assert report["regions"]["eager"] == 0 and report["calls"]["compiled"] > 0
    assert (report["builds"], report["misses"]) == (0, [])
    # The same again, from the host's cache.
    assert "warmgraph_1_0_model" in place.server.run(place.prompt(seed=3)).cached
    place.switch(compile_all=False)
    with_node = place.prompt(seed=3)
    put_node(with_node, graphs="")  # says nothing else, but the host's cache does not know that
    other = place.server.run(with_node)
    (with_report,) = place.server.model_reports(other)
    assert with_report["by"] == "node" and with_report["regions"]["eager"] == 0
    assert with_report["nodes"] == [{"workflow": None, "node": "9"}]
    assert torch.equal(place.latent(run), place.latent(other))
    # Off again: ComfyUI alone, and a bit different by rounding.
    before = place.server.report()["runs"]
    eager = place.server.run(place.prompt(seed=3))
    assert place.server.model_reports(eager) == [] and place.server.report()["runs"] == before
    assert not torch.equal(place.latent(eager), place.latent(run))
    torch.testing.assert_close(place.latent(eager), place.latent(run), rtol=1e-3, atol=1e-3)


def test_a_saved_workflow_keeps_its_compiled_files_and_names_its_nodes(place: Place) -> None:
    workflow = {"id": "w-1", "nodes": [], "links": [], "extra": {}}
    path = place.server.save_workflow("everywhere", workflow)
    posted = {**workflow, "extra": {"warmgraph": {"path": path}}}
    run = place.server.run(place.prompt(seed=4), workflow=posted)
    report = place.report(run)
    assert report["by"] == "setting"
    assert report["nodes"] == [{"workflow": "w-1", "node": "4"}]
    folder = place.server.base / "user" / "default" / "workflows" / "everywhere.graphs"
    wait_for(lambda: len(list(folder.glob(".*.safetensors"))) > 5)
    # From another workflow the host's cache serves the same model, which tells of the last one.
    other = {"id": "w-2", "nodes": [], "links": [], "extra": {}}
    again = place.server.run(place.prompt(seed=5), workflow=other)
    assert "warmgraph_1_0_model" in again.cached
    assert place.report(again)["nodes"] == [{"workflow": "w-2", "node": "4"}]
    assert place.report(again)["id"] == report["id"]


def test_vaes_of_the_same_prompts(place: Place) -> None:
    prompt = place.prompt(seed=6)
    prompt["6"] = {"class_type": "VAEDecode", "inputs": {"samples": ["4", 0], "vae": ["1", 2]}}
    prompt["7"] = {"class_type": "PreviewImage", "inputs": {"images": ["6", 0]}}
    reports = place.server.model_reports(place.server.run(prompt))
    assert [report["by"] for report in reports] == ["setting"]
    place.switch(compile_all_vaes=True)
    place.server.request(
        "/warmgraph/builds", {"action": "pause"}
    )  # what it does is tried elsewhere
    prompt["4"]["inputs"]["seed"] = 7
    reports = place.server.model_reports(place.server.run(prompt))
    place.server.request("/warmgraph/builds", {"action": "cancel"})
    place.server.request("/warmgraph/builds", {"action": "resume"})
    nodes = {(report["by"], report["nodes"][0]["node"]) for report in reports}
    assert nodes == {("setting", "4"), ("setting", "6")}


def test_what_is_refused_is_named_as_without_the_setting(place: Place) -> None:
    said = []
    for on in (False, True):
        place.switch(compile_all=on)
        prompt = place.prompt()
        prompt["1"]["inputs"]["ckpt_name"] = "no-such-file.safetensors"
        prompt["4"]["inputs"]["sampler_name"] = "none"
        with pytest.raises(HostError) as refused:
            place.server.run(prompt)
        said.append(str(refused.value))
    assert said[0] == said[1] and "no-such-file" in said[0] and "warmgraph" not in said[0]


def test_a_prompt_to_compare_with_is_comfyuis_own(place: Place) -> None:
    """Bit by bit; and the steps of the one with our node are timed."""
    place.switch(compile_all=False)
    alone = place.server.run(place.prompt(seed=8, steps=4))
    place.switch(compile_all=True)
    ours = place.prompt(seed=8, steps=4)
    put_node(ours, when_missing="wait")
    ours["10"] = {
        "class_type": "WarmgraphLoadCompiledGraph",
        "inputs": {"model": ["9", 0], "folder": "everywhere.graphs", "strict": False},
    }
    ours["4"]["inputs"]["model"] = ["10", 0]
    answer = place.server.post("/warmgraph/plain", {"prompt": ours})
    assert answer["changed"] == 2
    run = place.server.run(answer["prompt"], extra_data={"warmgraph": {"plain": True}})
    assert torch.equal(place.latent(run), place.latent(alone))
    report = place.report(run)
    assert report["by"] == "node" and report["speed"]["form"] == "eager"
    # The same where the setting put the node in: nothing is compiled, and steps are timed.
    bare = place.server.run(
        place.prompt(seed=8, steps=4), extra_data={"warmgraph": {"plain": True}}
    )
    assert torch.equal(place.latent(bare), place.latent(alone))
    report = place.report(bare)
    assert report["by"] == "setting" and report["speed"]["form"] == "eager"
    assert report["backend"] == "eager" and report["builds"] == 0


def test_places_are_those_of_the_setting(place: Place) -> None:
    found = place.server.post(
        "/warmgraph/places", {"prompt": place.prompt(), "kinds": ["model", "vae"]}
    )
    assert found == {
        "places": [
            {
                "node": "4",
                "class": "KSampler",
                "input": "model",
                "kind": "model",
                "origin": ["1", 0],
            }
        ],
        "left": [],
    }


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something holds that another thread of the server sees to."""
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
