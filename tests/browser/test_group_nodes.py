"""Workflows saved with *group nodes*, of which the host's page makes subgraphs as it opens them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from warmgraph_tools import templates
from warmgraph_tools.page import Page

ROOT = Path(__file__).resolve().parents[2]
MODEL = "sd_xl_base_1.0.safetensors"
OURS = ("WarmgraphCompileModel", "WarmgraphDeepCache")
TYPE = "workflow>Fast model"


def _with_group() -> dict[str, Any]:
    """The template of DeepCache as older pages saved it with both of our nodes in a group node."""
    workflow = templates.read("deepcache")
    nodes = {node["type"]: node for node in workflow["nodes"]}
    nodes["EmptyLatentImage"]["widgets_values"] = [128, 128, 1]
    nodes["KSampler"]["widgets_values"] = [1, "fixed", 4, 7.0, "euler", "normal", 1.0]
    first, last = (nodes[kind] for kind in OURS)
    first["widgets_values"] = ["never", "", "eager", "auto"]
    values = [value for node in (first, last) for value in node["widgets_values"]]
    model = {"name": "model", "type": "MODEL"}
    (link,) = (each["link"] for each in first["inputs"] if each["name"] == "model")
    group = {
        **first,
        "type": TYPE,
        "inputs": [{**model, "link": link}],
        "outputs": [{**model, "links": last["outputs"][0]["links"]}],
        "properties": {"Node name for S&R": TYPE},
        "widgets_values": values,
    }
    inner = [
        {
            **{name: node[name] for name in ("type", "pos", "size", "flags", "order", "mode")},
            "inputs": [{**model, "link": None}],
            "outputs": [{**model, "links": []}],
            "properties": node["properties"],
            "widgets_values": node["widgets_values"],
            "index": index,
        }
        for index, node in enumerate((first, last))
    ]
    inside = first["outputs"][0]["links"]
    workflow["nodes"] = [group, *(n for n in workflow["nodes"] if n not in (first, last))]
    workflow["links"] = [
        [number, group["id"] if source == last["id"] else source, *rest]
        for number, source, *rest in workflow["links"]
        if number not in inside
    ]
    workflow["extra"]["groupNodes"] = {
        TYPE.removeprefix("workflow>"): {
            "nodes": inner,
            "links": [[0, 0, 1, 0, first["id"], "MODEL"]],
            "external": [[1, 0, "MODEL"]],
        }
    }
    return dict(workflow)


def _boxes(page: Page, *, after: str = "") -> dict[str, str]:
    """What our nodes show in the graph in front, by their class; at once after a statement."""
    return dict(
        page.run(
            f"{after}; return app.canvas.graph.nodes"
            ".filter((n) => /^Warmgraph/.test(n.comfyClass))"
            ".map((n) => [n.comfyClass, n.widgets.find((w) => w.name === 'warmgraph_status')"
            ".element.innerText])"
        )
    )


def test_nodes_of_a_group_node_show_what_they_do_where_the_page_puts_them(page: Page) -> None:
    page.run(f"await app.loadGraphData({json.dumps(_with_group())}, true, true, 'grouped')")
    group = "app.rootGraph.nodes.find((n) => n.isSubgraphNode?.())"
    place = page.wait_for(f"{group} && app.vueAppReady && String({group}.id)")
    assert page.run("return app.rootGraph.extra.groupNodes ?? null") is None
    page.run_workflow()
    page.run(f"app.canvas.openSubgraph({group}.subgraph, {group})")
    page.wait_for(
        "[...document.querySelectorAll('.dom-widget .warmgraph-mark')].some((e) =>"
        " e.checkVisibility())"
    )
    said = dict(zip(OURS, ("⚠ running at normal speed", "DeepCache, last run: "), strict=True))
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        boxes = _boxes(page)
        if all(boxes[kind].startswith(text) for kind, text in said.items()):
            break
        time.sleep(0.1)
    assert set(boxes) == set(OURS)
    assert boxes[OURS[0]].startswith(said[OURS[0]]) and boxes[OURS[1]].startswith(said[OURS[1]])
    page.wait_for(
        f"app.canvas.graph.nodes.find((n) => n.comfyClass === {OURS[0]!r}).badges"
        ".some((b) => (typeof b === 'function' ? b() : b).text === 'normal speed')"
    )

    inner = page.run(f"return app.canvas.graph.nodes.find((n) => n.comfyClass === {OURS[0]!r}).id")
    progress = {"node": f"{place}:{inner}", "text": "a line of progress"}
    told = f"app.api.dispatchCustomEvent('warmgraph.report', {json.dumps(progress)})"
    boxes = _boxes(page, after=told)
    assert boxes[OURS[0]] == "a line of progress"
    assert boxes[OURS[1]].startswith(said[OURS[1]])
    assert page.own_errors() == []
