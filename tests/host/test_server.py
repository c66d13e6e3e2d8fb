"""The test server itself: a real host that starts, answers, restarts and stops."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from warmgraph_console.convert import to_prompt
from warmgraph_tools import templates
from warmgraph_tools.host import Graph, HostError, Server
from warmgraph_tools.install import shipped_entries

PlaceModel = Callable[..., str]


def small_prompt(checkpoint: str, *, seed: int = 1, steps: int = 2) -> Graph:
    """Return a text-to-image prompt of 64x64 pixels that saves its latent."""
    return {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": checkpoint}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": "a cat"}},
        "3": {
            "class_type": "EmptyLatentImage",
            "inputs": {"width": 64, "height": 64, "batch_size": 1},
        },
        "4": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["1", 0],
                "positive": ["2", 0],
                "negative": ["2", 0],
                "latent_image": ["3", 0],
                "seed": seed,
                "steps": steps,
                "cfg": 7.0,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1.0,
            },
        },
        "5": {
            "class_type": "SaveLatent",
            "inputs": {"samples": ["4", 0], "filename_prefix": "latents/small"},
        },
    }


def test_a_prompt_runs_and_its_files_are_found(server: Server, place_model: PlaceModel) -> None:
    run = server.run(small_prompt(place_model(server, "narrow15")))
    (latent,) = server.files(run, "latents")
    assert latent.is_file() and run.seconds > 0


def test_refused_and_failing_prompts_say_why(server: Server, place_model: PlaceModel) -> None:
    with pytest.raises(HostError, match="no-such-file"):
        server.run(small_prompt("no-such-file.safetensors"))
    graph = small_prompt(place_model(server, "narrow15"), seed=2)
    graph["3"] = {"class_type": "LoadLatent", "inputs": {"latent": "damaged.latent"}}
    (server.base / "input" / "damaged.latent").write_bytes(b"nothing")
    with pytest.raises(HostError, match="LoadLatent failed"):
        server.run(graph)


def test_the_pack_is_installed_without_what_only_developers_need() -> None:
    names = {entry.name for entry in shipped_entries()}
    assert {"__init__.py", "backends", "nodes", "web", "workflows", "pyproject.toml"} <= names
    assert not names & {"tests", "dev", ".ci"}


class TestConverter:
    """`to_prompt` on shapes of workflow that the shipped ones do not have."""

    INFO: ClassVar[dict[str, Any]] = {
        "Source": {
            "display_name": "Source",
            "input": {
                "required": {
                    "seed": ["INT", {"control_after_generate": True}],
                    "choice": [["a", "b"]],
                    "forced": ["INT", {"forceInput": True}],
                },
                "optional": {"size": ["FLOAT", {}]},
            },
            "input_order": {"required": ["seed", "choice", "forced"], "optional": ["size"]},
        },
        "Pass": {
            "display_name": "",
            "input": {"required": {"x": ["T"]}},
            "input_order": {"required": ["x"]},
        },
        "Compare": {
            "display_name": "",
            "input": {"required": {"view": ["IMAGECOMPARE", {}], "x": ["T"]}},
            "input_order": {"required": ["view", "x"]},
        },
    }

    @staticmethod
    def node(number: int, kind: str, link: int | None, *, mode: int = 0, **more: Any) -> Any:
        inputs = [{"name": "x", "type": "T", "link": link}] if kind != "Source" else []
        return {"id": number, "type": kind, "mode": mode, "inputs": inputs, **more}

    def convert(self, *middle: Any) -> Any:
        source = self.node(1, "Source", None, widgets_values=[5, "fixed", "b", 2.0])
        links = [[n, n, 0, n + 1, 0, "T"] for n in range(1, len(middle) + 1)]
        return to_prompt({"nodes": [source, *middle], "links": links}, self.INFO)

    def test_widget_values_are_named_and_the_pages_own_widget_is_dropped(self) -> None:
        inputs = self.convert()["1"]["inputs"]
        assert inputs == {"seed": 5, "choice": "b", "size": 2.0}

    @pytest.mark.parametrize(("kind", "mode"), [("Pass", 4), ("Reroute", 0)])
    def test_links_pass_through_bypassed_nodes_and_reroutes(self, kind: str, mode: int) -> None:
        prompt = self.convert(self.node(2, kind, 1, mode=mode), self.node(3, "Pass", 2))
        assert set(prompt) == {"1", "3"}
        assert prompt["3"]["inputs"] == {"x": ["1", 0]}

    def test_what_a_widget_only_shows_is_sent_as_the_page_does(self) -> None:
        prompt = self.convert(self.node(2, "Compare", 1, widgets_values=[]))
        assert prompt["2"]["inputs"] == {"view": {"__value__": ["", ""]}, "x": ["1", 0]}

    def test_a_muted_node_takes_its_links_with_it(self) -> None:
        prompt = self.convert(self.node(2, "Pass", 1, mode=2), self.node(3, "Pass", 2))
        assert prompt["3"]["inputs"] == {}

    def within(self, *values: Any, link: int | None = None, mode: int = 0) -> Any:
        """A source whose size is the subgraph's widget, and two that pass on: one what comes from
        outside, one the source.
        """
        size = {"name": "size", "type": "FLOAT", "widget": {"name": "size"}, "link": 4}
        inner = [
            {
                **self.node(1, "Source", None, widgets_values=[5, "fixed", "b", 2.0]),
                "inputs": [size],
            },
            self.node(2, "Pass", 3),
            self.node(3, "Pass", 1),
        ]
        links = [(1, 1, 0, 3, 0), (2, 3, 0, -20, 0), (3, -10, 0, 2, 0), (4, -10, 1, 1, 0)]
        names = ("id", "origin_id", "origin_slot", "target_id", "target_slot")
        subgraph = {
            "id": "S",
            "name": "Within",
            "nodes": inner,
            "links": [dict(zip(names, each, strict=True)) for each in links],
            "inputs": [{"name": "x", "linkIds": [3]}, {"name": "size", "linkIds": [4]}],
            "outputs": [{"linkIds": [2]}],
        }
        outer = self.node(8, "S", link, mode=mode, widgets_values=list(values))
        outer["inputs"].append({"name": "size", "type": "FLOAT", "widget": {}, "link": None})
        source = self.node(1, "Source", None, widgets_values=[6, "fixed", "a", 1.0])
        nodes = [source, outer, self.node(9, "Pass", 2)]
        workflow = {"nodes": nodes, "links": [[1, 1, 0, 8, 0, "T"], [2, 8, 0, 9, 0, "T"]]}
        return to_prompt({**workflow, "definitions": {"subgraphs": [subgraph]}}, self.INFO)

    def test_what_is_in_a_subgraph_stands_beside_the_rest_under_its_nodes_id(self) -> None:
        prompt = self.within(7.0, link=1)
        assert {place: entry["inputs"] for place, entry in prompt.items()} == {
            "1": {"seed": 6, "choice": "a", "size": 1.0},
            "8:1": {"seed": 5, "choice": "b", "size": 7.0},
            "8:2": {"x": ["1", 0]},
            "8:3": {"x": ["8:1", 0]},
            "9": {"x": ["8:3", 0]},
        }
        unlinked = self.within()
        assert unlinked["8:2"]["inputs"] == {} and unlinked["8:1"]["inputs"]["size"] == 2.0

    def test_a_subgraph_that_is_bypassed_or_muted_is_one_node(self) -> None:
        assert self.within(7.0, link=1, mode=4)["9"]["inputs"] == {"x": ["1", 0]}
        assert self.within(7.0, link=1, mode=2)["9"]["inputs"] == {}
        assert set(self.within(7.0, link=1, mode=4)) == {"1", "9"}

    def test_only_what_the_ends_need_is_taken(self) -> None:
        source = self.node(1, "Source", None, widgets_values={"size": 3.0, "shown": "by a page"})
        nodes = [source, self.node(2, "Pass", 1), self.node(3, "Unknown", 2)]
        links = [[1, 1, 0, 2, 0, "T"], [2, 2, 0, 3, 0, "T"]]
        prompt = to_prompt({"nodes": nodes, "links": links}, self.INFO, ends={"Pass"})
        assert {place: entry["inputs"] for place, entry in prompt.items()} == {
            "1": {"size": 3.0},
            "2": {"x": ["1", 0]},
        }

    def test_unknown_classes_and_leftover_values_are_refused(self) -> None:
        with pytest.raises(ValueError, match="known class"):
            self.convert(self.node(2, "Unknown", 1))
        with pytest.raises(ValueError, match="left over"):
            self.convert(self.node(2, "Pass", 1, widgets_values=[1]))
        with pytest.raises(ValueError, match="left over"):
            self.within(7.0, 8.0)


def test_every_shipped_workflow_converts(server: Server) -> None:
    info = server.object_info()
    for key in templates.TEMPLATES:
        prompt = to_prompt(templates.read(key), info)
        for node in prompt.values():
            required = info[node["class_type"]]["input"].get("required", {})
            assert set(required) <= set(node["inputs"]), (key, node)


@pytest.mark.parametrize("language", ["en", "zh", "ja"])
def test_the_help_of_each_node_is_where_the_page_asks_for_it_first(
    server: Server, language: str
) -> None:
    """In English where there is none in that language."""
    docs = Path(__file__).parents[2] / "web" / "docs"
    ours = [name for name in server.object_info() if name.startswith("Warmgraph")]
    assert len(ours) >= 8
    for name in ours:
        asked = f"{server.url}/extensions/warmgraph/docs/{name}/{language}.md"
        with urllib.request.urlopen(asked, timeout=180) as answer:
            page = answer.read().decode()
        written = docs / name / f"{language}.md"
        expected = written if written.is_file() else docs / f"{name}.md"
        assert page == expected.read_text("utf-8")


@pytest.mark.parametrize("path", ["Nothing/en.md", "WarmgraphWarmUp/..%2f..%2fjs.md"])
def test_no_other_page_is_there(server: Server, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{server.url}/extensions/warmgraph/docs/{path}", timeout=180)
