"""The setting that compiles every model, as the page meets it: the tests are one story over one
workflow and come in their order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from warmgraph_tools.host import Server
from warmgraph_tools.page import TAB_BUTTON, TOAST, TOASTS, Page

TAB = ".warmgraph-tab"
REPORT = "(await (await fetch('/warmgraph/report')).json())"
NODES = "return [...app.rootGraph.nodes].map((n) => [n.id, n.type, [...n.pos], [...n.size]])"
FIND = "const find = (kind) => app.rootGraph.nodes.find((n) => n.comfyClass === kind);"


@pytest.fixture(scope="module")
def page(page: Page, server: Server) -> Iterator[Page]:
    """A page with text_to_image open, its Compile Model bypassed, over a server that builds nothing
    and has the setting on.
    """
    server.post("/warmgraph/settings", {"compile_all": True})
    server.post("/warmgraph/builds", {"action": "pause"})
    try:
        page.open_server()  # the page takes its settings as it opens
        page.open_shipped("text_to_image")
        page.set_widget("KSampler", "steps", 1)
        page.set_widget("EmptyLatentImage", "width", 64)
        page.set_widget("EmptyLatentImage", "height", 64)
        page.run(
            f"{FIND} find('WarmgraphCompileModel').mode = 4;"
            "const report = find('WarmgraphGraphReport'); if (report) report.mode = 2;"
        )
        page.errors.clear()
        yield page
    finally:
        server.post("/warmgraph/settings", {"compile_all": False})
        server.post("/warmgraph/builds", {"action": "cancel"})
        server.post("/warmgraph/builds", {"action": "resume"})


def _run(page: Page) -> dict[str, Any]:
    """Run the open workflow; returns the prompt that the host executed."""
    page.run_workflow()
    (*_, last) = page.server.get("/history").values()
    prompt: dict[str, Any] = last["prompt"][2]
    return prompt


def _placed(prompt: dict[str, Any]) -> dict[str, Any]:
    return {key: node for key, node in prompt.items() if key.startswith("warmgraph_")}


def _left(server: Server) -> list[tuple[str, str]]:
    left = server.report()["everywhere"]["left"]
    return [(each["node"], each["line"]["key"]) for each in left]


def test_a_bypassed_node_says_not_this_one(page: Page, server: Server) -> None:
    prompt = _run(page)
    (sampler,) = (key for key, node in prompt.items() if node["class_type"] == "KSampler")
    assert _placed(prompt) == {} and _left(server) == [(sampler, "left_alone_bypassed")]
    page.click(TAB_BUTTON)
    why = f"KSampler {sampler}: a node of Warmgraph is bypassed there"
    shown = f"document.querySelector('{TAB} [data-key=left]')?.textContent"
    page.wait_for(f"{shown} === {'The setting left 1 model alone.' + why!r}")


def test_in_a_subgraph_as_well(page: Page, server: Server) -> None:
    page.run(
        f"{FIND} app.rootGraph.convertToSubgraph(new Set([find('WarmgraphCompileModel'),"
        "find('KSampler')]));"
    )
    prompt = _run(page)
    (sampler,) = (key for key, node in prompt.items() if node["class_type"] == "KSampler")
    assert ":" in sampler
    assert _placed(prompt) == {} and _left(server) == [(sampler, "left_alone_bypassed")]


def test_without_a_node_the_sampler_in_the_subgraph_gets_one_and_no_page_is_confused(
    page: Page, server: Server
) -> None:
    page.run(
        """
        const outer = app.rootGraph.nodes.find((n) => n.subgraph);
        const inner = outer.subgraph;
        const compile = inner.nodes.find((n) => n.comfyClass === 'WarmgraphCompileModel');
        const sampler = inner.nodes.find((n) => n.comfyClass === 'KSampler');
        const slot = inner.inputs.findIndex((input) => input.type === 'MODEL');
        inner.remove(compile);
        const input = sampler.inputs.find((i) => i.name === 'model');
        inner.inputNode.slots[slot].connect(input, sampler);
        """
    )
    before = page.run(NODES)
    prompt = _run(page)
    ((name, node),) = _placed(prompt).items()
    (sampler,) = (key for key, each in prompt.items() if each["class_type"] == "KSampler")
    assert prompt[sampler]["inputs"]["model"] == [name, 0] and ":" not in name
    assert node["class_type"] == "WarmgraphCompileModel" and _left(server) == []
    workflow = page.run("return String(app.rootGraph.id)")
    (report,) = (r for r in server.report()["models"] if r["by"] == "setting")
    assert report["nodes"] == [{"workflow": workflow, "node": sampler}]
    page.wait_for(f"document.querySelector('{TAB}')?.innerText.includes('Compiled by the setting')")
    assert page.run(NODES) == before
    assert page.own_errors() == []


def test_the_first_success_of_a_node_offers_the_setting_once(page: Page, server: Server) -> None:
    page.set_setting("Warmgraph.Speed.CompileAll", False)
    said = {
        "model": "SDXL",
        "standing": "compiled",
        "lines": [],
        "factor": 3.0,
        "times": "3.0",
        "nodes": [],
        "ready": 0,
    }
    for count in (1, 2):
        # In one go: what the server says of its own models between them would count.
        page.run(
            "".join(
                "app.api.dispatchCustomEvent('warmgraph.report', "
                + json.dumps({"models": [{**said, "id": f"number {count}", "stage": stage}]})
                + ");"
                for stage in ("compiling", "faster")
            )
        )
        faster = f"{TOASTS}.filter((text) => /SDXL: 3.0x faster/.test(text))"
        page.wait_for(f"{faster}.length === {count}")
        page.wait_for(f"{faster}.filter((text) => /in all workflows/.test(text)).length === 1")
    page.click_first(f"{TOAST} button", "/in all workflows/.test(e.innerText)")
    page.wait_for(f"{REPORT}.settings.compile_all === true")
    assert page.run("return app.extensionManager.setting.get('Warmgraph.Speed.CompileAll')") is True
    page.run("await app.extensionManager.command.execute('Warmgraph.MakeFaster')")
    assert "The setting compiles all models already" in page.toast("1 node added")
    assert page.own_errors() == []
