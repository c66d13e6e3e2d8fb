"""The setting that compiles every model, on a real server and by API: no prompt names our nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from warmgraph_tools.host import Graph, Run, Server

from .test_server import small_prompt


class Place:
    """A server with the setting on, and a model whose compiled files are there."""

    def __init__(self, server: Server, checkpoint: str) -> None:
        self.server, self.checkpoint = server, checkpoint

    def prompt(self, *, seed: int = 1) -> Graph:
        return small_prompt(self.checkpoint, seed=seed)

    def latent(self, run: Run) -> torch.Tensor:
        (file,) = self.server.files(run, "latents")
        return load_file(file)["latent_tensor"]

    def switch(self, **settings: bool) -> None:
        self.server.post("/warmgraph/settings", settings)

    def last(self) -> dict[str, Any]:
        """The report of the model that came last."""
        return dict(self.server.report()["models"][-1])


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
    report = place.last()
    assert report["by"] == "setting"
    assert report["nodes"] == [{"workflow": None, "node": "4"}]
    assert report["regions"]["eager"] == 0 and report["calls"]["compiled"] > 0
    assert (report["builds"], report["misses"]) == (0, [])
    # The same again, from the host's cache.
    assert "warmgraph_1_0_model" in place.server.run(place.prompt(seed=3)).cached
    place.switch(compile_all=False)
    with_node = place.prompt(seed=3)
    put_node(with_node)
    other = place.server.run(with_node)
    (with_report,) = place.server.model_reports(other)
    assert with_report["by"] == "node" and with_report["regions"]["eager"] == 0
    assert with_report["nodes"] == [{"workflow": None, "node": "9"}]
    assert torch.equal(place.latent(run), place.latent(other))
    # Off again: ComfyUI alone, and a bit different by rounding.
    before = place.server.report()["models"]
    eager = place.server.run(place.prompt(seed=3))
    assert [m["calls"] for m in place.server.report()["models"]] in (
        [m["calls"] for m in before],
        [],
    )
    assert not torch.equal(place.latent(eager), place.latent(run))
    torch.testing.assert_close(place.latent(eager), place.latent(run), rtol=1e-3, atol=1e-3)
