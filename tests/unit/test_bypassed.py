"""Which samplers lie behind a bypassed Compile Model, by workflows as the page writes them."""

from __future__ import annotations

import copy
import itertools
import sys
from types import ModuleType
from typing import Any

import pytest

ACTIVE, MUTED, BYPASSED = 0, 2, 4
INNER = "1f2e3d4c-0000-4000-8000-000000000001"
MIDDLE = "1f2e3d4c-0000-4000-8000-000000000002"


@pytest.fixture(scope="module")
def bypassed(pack: ModuleType) -> Any:
    return sys.modules[f"{pack.__name__}.nodes.bypassed"]


@pytest.fixture(scope="module")
def model(pack: ModuleType) -> Any:
    return sys.modules[f"{pack.__name__}.nodes.placing"].MODEL


@pytest.fixture(scope="module")
def ask(bypassed: Any, model: Any) -> Any:
    def ask(workflow: Any, node: str) -> bool:
        return bool(bypassed.Workflow(workflow).is_bypassed(node, "model", model))

    return ask


def node(
    number: int, kind: str, link: int | None = None, *, mode: int = ACTIVE, **more: Any
) -> Any:
    inputs = [] if link is None else [{"name": "model", "type": "MODEL", "link": link}]
    return {"id": number, "type": kind, "mode": mode, "inputs": inputs, **more}


def compile_node(number: int, link: int, mode: int = BYPASSED) -> Any:
    return node(number, "WarmgraphCompileModel", link, mode=mode)


def chain(*between: Any) -> dict[str, Any]:
    """A loader, what is between, and a sampler, in this order, each linked to the one before."""
    nodes = [node(1, "UNETLoader"), *between, node(99, "KSampler", 99)]
    links = []
    for before, after in itertools.pairwise(nodes):
        after["inputs"][0]["link"] = after["id"]
        links.append([after["id"], before["id"], 0, after["id"], 0, "MODEL"])
    return {"nodes": nodes, "links": links}


def as_subgraph(identity: str, graph: dict[str, Any], *, takes: int, gives: Any = None) -> Any:
    """A graph as it lies under `definitions`, its first node replaced by the subgraph's input."""
    links = [
        dict(
            zip(("id", "origin_id", "origin_slot", "target_id", "target_slot"), each, strict=False)
        )
        for each in graph["links"]
    ]
    for link in links:
        if link["origin_id"] == takes:
            link["origin_id"] = -10
    if gives is not None:
        links.append(
            {"id": 500, "origin_id": gives, "origin_slot": 0, "target_id": -20, "target_slot": 0}
        )
    nodes = [each for each in graph["nodes"] if each["id"] != takes]
    return {
        "id": identity,
        "nodes": nodes,
        "links": links,
        "inputs": [{"name": "model", "type": "MODEL"}],
        "outputs": [{"name": "MODEL", "type": "MODEL"}],
    }


def with_subgraphs(root: dict[str, Any], *subgraphs: Any) -> dict[str, Any]:
    return {**root, "definitions": {"subgraphs": list(subgraphs)}}


@pytest.mark.parametrize("mode", [MUTED, BYPASSED])
def test_in_the_root(ask: Any, mode: int) -> None:
    lora = node(3, "LoraLoaderModelOnly", 0)
    reroute = {"id": 4, "type": "Reroute", "mode": 0, "inputs": [{"name": "", "type": "*"}]}
    workflow = chain(compile_node(2, 0, mode), lora, reroute)
    assert ask(workflow, "99")
    assert not ask(chain(compile_node(2, 0, ACTIVE), lora), "99")
    assert not ask(chain(node(2, "LoraLoaderModelOnly", 0, mode=mode)), "99")
    assert ask(chain(node(2, "WarmgraphLoadCompiledGraph", 0, mode=mode)), "99")


def test_another_branch_is_another_model(ask: Any) -> None:
    workflow = chain(compile_node(2, 0))
    workflow["nodes"].append(node(98, "KSampler", 200))
    workflow["links"].append([200, 1, 0, 98, 0, "MODEL"])
    assert ask(workflow, "99") and not ask(workflow, "98")


def test_a_merge_hands_on_the_first_of_its_models(ask: Any) -> None:
    def merged(first: int, second: int) -> Any:
        inputs = [{"name": f"model{n}", "type": "MODEL", "link": 10 + n} for n in (1, 2)]
        merge = {"id": 4, "type": "ModelMergeSimple", "mode": 0, "inputs": inputs}
        nodes = [node(1, "UNETLoader"), compile_node(2, 5), merge, node(99, "KSampler", 6)]
        links = [
            [5, 1, 0, 2, 0, "MODEL"],
            [11, first, 0, 4, 0, "MODEL"],
            [12, second, 0, 4, 1, "MODEL"],
            [6, 4, 0, 99, 0, "MODEL"],
        ]
        return {"nodes": nodes, "links": links}

    assert ask(merged(2, 1), "99") and not ask(merged(1, 2), "99")


def test_in_a_subgraph(ask: Any) -> None:
    inner = as_subgraph(INNER, chain(compile_node(2, 0)), takes=1)
    plain = as_subgraph(MIDDLE, chain(node(2, "LoraLoaderModelOnly", 0)), takes=1)
    root = chain(node(57, INNER, 0), node(58, MIDDLE, 0))
    root["nodes"][2]["inputs"][0]["link"] = 57
    workflow = with_subgraphs(root, inner, plain)
    assert ask(workflow, "57:99") and ask(workflow, "57/99")
    assert not ask(workflow, "58:99")


def test_outside_of_the_samplers_subgraph(ask: Any) -> None:
    inner = as_subgraph(INNER, chain(node(2, "ModelSamplingFlux", 0)), takes=1)
    middle = as_subgraph(MIDDLE, chain(node(5, INNER, 0)), takes=1)
    workflow = with_subgraphs(chain(compile_node(2, 0), node(57, MIDDLE, 0)), inner, middle)
    assert ask(workflow, "57:5:99")
    workflow["nodes"][1]["mode"] = ACTIVE
    assert not ask(workflow, "57:5:99")


def test_in_a_subgraph_that_gives_the_model(ask: Any) -> None:
    loads = as_subgraph(INNER, chain(compile_node(2, 0)), takes=0, gives=2)
    workflow = with_subgraphs(chain(node(57, INNER, 0)), loads)
    assert ask(workflow, "99")
    loads["nodes"][1]["mode"] = ACTIVE
    assert not ask(workflow, "99")
    workflow["nodes"][1]["mode"] = BYPASSED  # and with it what is in it
    assert ask(workflow, "99")


def test_of_two_uses_of_a_subgraph_each_has_its_own_way(ask: Any) -> None:
    inner = as_subgraph(INNER, chain(node(2, "ModelSamplingFlux", 0)), takes=1)
    root = chain(compile_node(2, 0), node(57, INNER, 0))
    root["nodes"].append(node(58, INNER, 300))
    root["links"].append([300, 1, 0, 58, 0, "MODEL"])
    workflow = with_subgraphs(root, inner)
    assert ask(workflow, "57:99") and not ask(workflow, "58:99")


def test_what_is_set_and_got_by_name(ask: Any) -> None:
    workflow = chain(compile_node(2, 0))
    workflow["nodes"][2]["type"] = "SetNode"
    workflow["nodes"][2]["widgets_values"] = ["model"]
    getter = {"id": 5, "type": "GetNode", "mode": 0, "inputs": [], "widgets_values": ["model"]}
    other = {**getter, "id": 6, "widgets_values": ["another"]}
    workflow["nodes"] += [getter, other, node(7, "KSampler", 400), node(8, "KSampler", 401)]
    workflow["links"] += [[400, 5, 0, 7, 0, "MODEL"], [401, 6, 0, 8, 0, "MODEL"]]
    assert ask(workflow, "7") and not ask(workflow, "8")


@pytest.mark.parametrize(
    "workflow",
    [
        None,
        [],
        {},
        {"nodes": None, "links": 3, "definitions": []},
        {"nodes": [None, {"id": 99, "inputs": {"model": 1}}], "links": [[1], {}, None]},
        {"nodes": [node(99, "KSampler", 5)], "links": [[5, 44, 0, 99, 0, "MODEL"]]},
        {"nodes": [node(99, "KSampler", 5)], "links": [[5, -10, 0, 99, 0, "MODEL"]]},
        {"nodes": [node(99, "KSampler", 5)], "links": [[5, 99, 0, 99, 0, "MODEL"]]},
    ],
)
def test_other_shapes_tell_nothing(ask: Any, workflow: Any) -> None:
    for name in ("99", "99:99", "", ":", "a:b/c"):
        assert not ask(workflow, name)


def test_a_subgraph_within_itself_ends(ask: Any) -> None:
    inner = as_subgraph(INNER, chain(node(57, INNER, 0)), takes=1, gives=57)
    workflow = with_subgraphs(chain(node(57, INNER, 0)), inner)
    assert not ask(workflow, "99") and not ask(workflow, ":".join(["57"] * 200 + ["99"]))


def test_a_workflow_is_not_changed(ask: Any) -> None:
    workflow = with_subgraphs(chain(node(57, INNER, 0)), as_subgraph(INNER, chain(), takes=1))
    before = copy.deepcopy(workflow)
    ask(workflow, "57:99")
    assert workflow == before
