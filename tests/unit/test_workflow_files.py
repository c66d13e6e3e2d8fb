"""The shipped workflows as files: links with two ends, nodes side by side, notes that are true."""

from __future__ import annotations

import io
import itertools
import json
import re
from typing import Any

import pytest
from PIL import Image, ImageChops, ImageStat

from warmgraph_tools import templates, thumbnails

FILES = [templates.path(key) for key in templates.TEMPLATES]
TITLE = 30
"""Pixels of a node's title, which stands above its position."""


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def workflow(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(json.loads(request.param.read_text(encoding="utf-8")))


def test_the_table_names_every_file() -> None:
    shipped = {path.name for path in templates.FOLDER.iterdir()}
    assert shipped == {path.with_suffix(end).name for path in FILES for end in (".json", ".jpg")}


def test_titles_are_found_by_search_in_their_order_and_fit_any_file_system_and_url() -> None:
    """The host's search puts names of fewer words first, and does not look far into long ones."""
    titles = [template.title for template in templates.TEMPLATES.values()]
    words = [len(title.split()) for title in titles]
    assert words == sorted(words) and words.count(words[0]) == 1
    for title in titles:
        assert re.fullmatch(r"[A-Z][\w.-]*( [\w.-]+)*", title, re.ASCII) and title[-1] != "."
        assert len(title) <= 30
    assert len(set(titles)) == len(titles)


def test_every_workflow_has_an_id_of_its_own() -> None:
    ids = [json.loads(path.read_text(encoding="utf-8"))["id"] for path in FILES]
    assert len(set(ids)) == len(FILES) > 0


def _graphs(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    """The workflow's own graph and its subgraphs, all with links and ends as the former has them;
    what stands for a subgraph's inputs and outputs is a node, too.
    """
    graphs = [workflow]
    for inner in workflow.get("definitions", {}).get("subgraphs", ()):
        names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
        inputs = [{"type": i["type"], "links": i["linkIds"]} for i in inner["inputs"]]
        outputs = [
            {"type": o["type"], "link": link} for o in inner["outputs"] for link in o["linkIds"]
        ]
        ends = [
            {**inner["inputNode"], "inputs": [], "outputs": inputs},
            {**inner["outputNode"], "inputs": outputs, "outputs": []},
        ]
        for end in ends:
            end |= {"type": "an end", "pos": end["bounding"][:2], "size": end["bounding"][2:]}
        graphs.append(
            {
                "nodes": [*inner["nodes"], *ends],
                "links": [[link[name] for name in names] for link in inner["links"]],
                "last_node_id": inner["state"]["lastNodeId"],
                "last_link_id": inner["state"]["lastLinkId"],
            }
        )
    return graphs


def test_links_are_the_same_at_both_ends(workflow: dict[str, Any]) -> None:
    for graph in _graphs(workflow):
        _expect_links_with_two_ends(graph)


def _expect_links_with_two_ends(graph: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in graph["nodes"]}
    left: set[tuple[int, int, int]] = set()
    entered: set[tuple[int, int, int]] = set()
    for node in graph["nodes"]:
        for slot, output in enumerate(node["outputs"]):
            left |= {(link, node["id"], slot) for link in output["links"] or ()}
        for slot, entry in enumerate(node["inputs"]):
            if entry.get("link") is not None:
                entered.add((entry["link"], node["id"], slot))
    links = graph["links"]
    assert left == {(link, source, slot) for link, source, slot, *_ in links}
    assert entered == {(link, target, slot) for link, _, _, target, slot, _ in links}
    for _, source, slot, target, entry, kind in links:
        assert nodes[source]["outputs"][slot]["type"] in (kind, "*") or kind == "*"
        taken = nodes[target]["inputs"][entry]["type"].split(",")
        assert {kind, "*"} & set(taken) or kind == "*"
    assert max(link[0] for link in links) <= graph["last_link_id"]
    assert max(nodes) <= graph["last_node_id"] and len(nodes) == len(graph["nodes"])


def test_no_node_lies_on_another(workflow: dict[str, Any]) -> None:
    for graph in _graphs(workflow):
        for one, two in itertools.combinations(graph["nodes"], 2):
            apart = [
                one["pos"][axis] + one["size"][axis] + between <= two["pos"][axis]
                or two["pos"][axis] + two["size"][axis] + between <= one["pos"][axis]
                for axis, between in enumerate((0, TITLE))
            ]
            assert any(apart), (one["type"], two["type"])


def test_a_transformers_loader_and_compile_model_are_in_a_subgraph_that_shows_what_people_set(
    workflow: dict[str, Any],
) -> None:
    """As in the host's own templates; the values on its node are those of the nodes inside."""
    (*outer, inner) = workflow.get("definitions", {}).get("subgraphs", ()) or ({},)
    loaders = {"CheckpointLoaderSimple", "UNETLoader"}
    kinds = {node["type"] for node in workflow["nodes"]}
    if not inner:
        assert "CheckpointLoaderSimple" in kinds
        return
    assert outer == [] and not kinds & loaders
    assert {"WarmgraphCompileModel"} <= {node["type"] for node in inner["nodes"]}
    (node,) = (node for node in workflow["nodes"] if node["type"] == inner["id"])
    shown = [entry.get("label", entry["name"]) for entry in inner["inputs"]]
    assert "prompt" in shown and {"seed", "noise_seed"} & set(shown)
    widgets = [entry for entry in node["inputs"] if "widget" in entry]
    assert [entry["name"] for entry in node["inputs"]] == [i["name"] for i in inner["inputs"]]
    assert len(widgets) == len(node["widgets_values"])
    nodes = {each["id"]: each for each in inner["nodes"]}
    for link in inner["links"]:
        if link["origin_id"] == inner["inputNode"]["id"] and link["type"] != "IMAGE":
            name = inner["inputs"][link["origin_slot"]]["name"]
            value = node["widgets_values"][[entry["name"] for entry in widgets].index(name)]
            assert value in nodes[link["target_id"]]["widgets_values"], name


def test_two_workflows_have_a_graph_report() -> None:
    having = [
        key
        for key in templates.TEMPLATES
        for node in templates.all_nodes(templates.read(key))
        if node["type"] == "WarmgraphGraphReport"
    ]
    assert having == ["load_compiled_graph", "step_cache_compare"]


def test_the_note_tells_every_model_its_folder_and_its_link(workflow: dict[str, Any]) -> None:
    [note] = [n["widgets_values"][0] for n in workflow["nodes"] if n["type"] == "MarkdownNote"]
    models = [
        (node, model)
        for node in templates.all_nodes(workflow)
        for model in node["properties"].get("models", ())
    ]
    assert models
    for node, model in models:
        assert model["name"] in node["widgets_values"]
        assert model["url"].startswith("https://") and model["url"].endswith(model["name"])
        expected = (
            f"`{model['name']}` in `models/{model['directory']}` ([download]({model['url']}))"
        )
        assert expected in note


@pytest.mark.parametrize("key", templates.TEMPLATES)
def test_the_templates_page_has_a_small_square_picture_of_each_that_is_up_to_date(key: str) -> None:
    """The host looks for NAME.jpg beside NAME.json; `python -m dev.tools.thumbnails` draws them."""
    file = templates.path(key).with_suffix(".jpg")
    assert 4_000 < file.stat().st_size < 40_000
    picture = Image.open(file).convert("RGB")
    assert picture.size == (thumbnails.SIDE, thumbnails.SIDE)
    drawn = Image.open(io.BytesIO(thumbnails.encoded(key))).convert("RGB")
    apart = ImageStat.Stat(ImageChops.difference(picture, drawn)).mean
    assert max(apart) < 4, "draw them again"  # another version of Pillow moves letters a little


def test_a_picture_has_the_factor_that_was_measured_and_none_where_nothing_was() -> None:
    written = {key: thumbnails.factor(each) for key, each in templates.TEMPLATES.items()}
    headline = json.loads(thumbnails.FIGURES.read_text("utf-8"))
    for key, template in templates.TEMPLATES.items():
        if template.figure is None:
            assert written[key] == ""
            continue
        measured = headline[template.figure]
        assert measured["unit"].startswith("eager / ")
        assert abs(float(written[key].removesuffix("x")) - measured["value"]) <= 0.05


def test_no_run_sets_a_whole_number_below_what_its_taker_allows(workflow: dict[str, Any]) -> None:
    """The node's own range begins below zero, and seeds do not: a random one is refused."""
    values = [n["widgets_values"] for n in _nodes(workflow) if n["type"] == "PrimitiveInt"]
    assert [value for value in values if value[1] == "randomize"] == []


def test_every_node_works_in_both_kinds_of_nodes(workflow: dict[str, Any]) -> None:
    kinds = [node["type"] for node in _nodes(workflow)]
    assert "ImageCompare" not in kinds, "it shows nothing without Nodes 2.0"


def _nodes(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [node for graph in _graphs(workflow) for node in graph["nodes"]]
