"""The shipped workflows as files: links with two ends, nodes side by side, notes that are true."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from warmgraph_tools import templates

FILES = [templates.path(key) for key in templates.TEMPLATES]
TITLE = 30
"""Pixels of a node's title, which stands above its position."""


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def workflow(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(json.loads(request.param.read_text(encoding="utf-8")))


def test_the_table_names_every_file() -> None:
    shipped = {path.name for path in templates.FOLDER.iterdir()}
    assert shipped == {path.with_suffix(end).name for path in FILES for end in (".json", ".jpg")}


def test_every_workflow_has_an_id_of_its_own() -> None:
    ids = [json.loads(path.read_text(encoding="utf-8"))["id"] for path in FILES]
    assert len(set(ids)) == len(FILES) > 0


def test_links_are_the_same_at_both_ends(workflow: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in workflow["nodes"]}
    left: set[tuple[int, int, int]] = set()
    entered: set[tuple[int, int, int]] = set()
    for node in workflow["nodes"]:
        for slot, output in enumerate(node["outputs"]):
            left |= {(link, node["id"], slot) for link in output["links"] or ()}
        for slot, entry in enumerate(node["inputs"]):
            if entry.get("link") is not None:
                entered.add((entry["link"], node["id"], slot))
    links = workflow["links"]
    assert left == {(link, source, slot) for link, source, slot, *_ in links}
    assert entered == {(link, target, slot) for link, _, _, target, slot, _ in links}
    for _, source, slot, target, entry, kind in links:
        assert nodes[source]["outputs"][slot]["type"] in (kind, "*") or kind == "*"
        taken = nodes[target]["inputs"][entry]["type"].split(",")
        assert {kind, "*"} & set(taken) or kind == "*"
    assert max(link[0] for link in links) <= workflow["last_link_id"]
    assert max(nodes) <= workflow["last_node_id"] and len(nodes) == len(workflow["nodes"])


def test_no_node_lies_on_another(workflow: dict[str, Any]) -> None:
    for one, two in itertools.combinations(workflow["nodes"], 2):
        apart = [
            one["pos"][axis] + one["size"][axis] + between <= two["pos"][axis]
            or two["pos"][axis] + two["size"][axis] + between <= one["pos"][axis]
            for axis, between in enumerate((0, TITLE))
        ]
        assert any(apart), (one["type"], two["type"])


def test_the_note_tells_every_model_its_folder_and_its_link(workflow: dict[str, Any]) -> None:
    [note] = [n["widgets_values"][0] for n in workflow["nodes"] if n["type"] == "MarkdownNote"]
    models = [
        (node, model)
        for node in workflow["nodes"]
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_templates_page_has_a_small_picture_of_each(path: Path) -> None:
    """The host looks for NAME.jpg beside NAME.json; `tools/pictures.py` makes them."""
    data = path.with_suffix(".jpg").read_bytes()
    assert data.startswith(b"\xff\xd8\xff") and 4_000 < len(data) < 40_000
