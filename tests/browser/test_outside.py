"""What is seen of our nodes from outside subgraphs, and of those that the last run did without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from warmgraph_tools.host import Server
from warmgraph_tools.page import STATUS, TAB_BUTTON, Page

MODEL = "sd_xl_base_1.0.safetensors"
NODE = "app.rootGraph.nodes.find((n) => n.comfyClass === 'WarmgraphCompileModel')"
#: What a badge may say of a model that has run compiled: how quick it is hangs on the machine.
DONE = r"/^(ready|\d+\.\dx|normal speed|⚠ needs your attention)$/"
#: By title or class, the badges of all nodes that have some.
BADGES = """Object.fromEntries([app.rootGraph, ...app.rootGraph.subgraphs.values()]
  .flatMap((graph) => graph.nodes)
  .map((n) => [n.isSubgraphNode?.() ? n.title : n.comfyClass,
    n.badges.map((b) => (typeof b === 'function' ? b() : b).text).filter(Boolean)]))"""


@pytest.fixture(scope="module", autouse=True)
def _large(page: Page) -> None:
    page.resize(1600, 1000)


@pytest.fixture(autouse=True)
def _no_errors(page: Page) -> Iterator[None]:
    yield
    assert page.own_errors() == []


def _open_small(page: Page, *, seed: int) -> None:
    page.open_shipped("text_to_image")
    page.set_widget("KSampler", "steps", 4)
    page.set_widget("KSampler", "seed", seed)
    page.set_widget("KSampler", "control_after_generate", "fixed")
    for side in ("width", "height"):
        page.set_widget("EmptyLatentImage", side, 64)


def _into_subgraph(page: Page, *kinds: str, title: str) -> None:
    """Put the root's nodes of these classes into a subgraph; a subgraph's node counts as one."""
    page.run(
        f"""
        app.canvas.deselectAll();
        app.canvas.selectItems(app.rootGraph.nodes.filter(
          (n) => {list(kinds)!r}.includes(n.comfyClass) || n.isSubgraphNode?.()));
        await app.extensionManager.command.execute('Comfy.Graph.ConvertToSubgraph');
        """
    )
    outer = "app.rootGraph.nodes.find((n) => n.isSubgraphNode?.())"
    page.wait_for(f"{outer} && app.canvas.graph === app.rootGraph")
    page.run(f"{outer}.title = {outer}.subgraph.name = {title!r}; app.canvas.deselectAll()")


def test_subgraphs_say_how_the_model_in_them_runs_at_every_level(page: Page) -> None:
    _open_small(page, seed=1)
    _into_subgraph(page, "CheckpointLoaderSimple", "WarmgraphCompileModel", "KSampler", title="In")
    _into_subgraph(page, "VAEDecode", title="Out")
    page.run_workflow()
    texts = page.wait_for(
        f"(() => {{ const all = {BADGES};"
        f" const three = ['Out', 'In', 'WarmgraphCompileModel'].map((name) => all[name]?.at(-1));"
        f" return three.every((text) => text === three[0] && {DONE}.test(text)) && three; }})()",
        seconds=600,
    )
    marked = page.run(f"return {BADGES}")
    assert not any(set(texts) & set(marked[kind]) for kind in ("KSampler", "VAEDecode"))


def test_the_newer_nodes_show_it_and_change_it(page: Page) -> None:
    badge = (
        "[...document.querySelectorAll('[data-node-id] *')]"
        ".find((e) => !e.children.length && {}.test(e.innerText))?.innerText"
    )
    page.set_setting("Comfy.VueNodes.Enabled", True)
    try:
        page.wait_for(badge.format(DONE))
        page.run(
            "const inner = [...app.rootGraph.subgraphs.values()].flatMap((graph) => graph.nodes);"
            " inner.find((n) => n.comfyClass === 'KSampler').widgets[0].value = 2;"
            " inner.find((n) => n.comfyClass === 'WarmgraphCompileModel')"
            ".widgets.find((w) => w.name === 'backend').value = 'eager';"
        )
        page.run_workflow()
        page.wait_for(badge.format("/^(normal speed|⚠ needs your attention)$/"))
    finally:
        page.set_setting("Comfy.VueNodes.Enabled", False)


def test_a_card_in_the_tab_leads_to_its_node_in_the_subgraphs(page: Page) -> None:
    page.click(TAB_BUTTON)
    page.run("app.canvas.setGraph(app.rootGraph)")
    page.click(".warmgraph-card [data-action=node]")
    selected = "[...app.canvas.selectedItems].map((n) => n.comfyClass)"
    page.wait_for(f"{selected}.includes('WarmgraphCompileModel')")
    assert page.run("return app.canvas.graph.name") == "In"
    page.run("app.canvas.setGraph(app.rootGraph)")


def test_a_card_of_another_workflow_says_so(page: Page) -> None:
    page.run("await app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    page.wait_for("!app.rootGraph.nodes.some((n) => n.isSubgraphNode?.())")
    page.click(".warmgraph-card [data-action=node]")
    page.toast("not in the open workflow")


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (f"{NODE}.mode = 4", "Bypassed or muted"),
        (f"{NODE}.disconnectOutput(0)", "linked to nothing"),
    ],
    ids=["bypassed", "detached"],
)
def test_a_node_that_the_last_run_did_without_says_so(page: Page, leave: str, said: str) -> None:
    _open_small(page, seed=3)
    page.run_workflow()
    box = f"{NODE}.widgets.find((w) => w.name === 'warmgraph_status').element"
    page.wait_for(f"/ a step|faster|parts/.test({box}.innerText)")
    page.run(
        "const find = (kind) => app.rootGraph.nodes.find((n) => n.comfyClass === kind);"
        " const loader = find('CheckpointLoaderSimple'), sampler = find('KSampler');"
        f" {leave}; if (!{NODE}.outputs[0].links?.length) loader.connect(0, sampler, 0);"
    )
    page.set_widget("KSampler", "seed", 4)
    page.run_workflow()
    page.wait_for(f"{box}.innerText.includes({said!r})")
    bar = f"{box}.querySelector('[role=progressbar], .warmgraph-headline')"
    assert page.run(f"return {bar}") is None
    assert page.run(f"return {BADGES}.WarmgraphCompileModel.some((t) => {DONE}.test(t))") is False


def test_a_node_before_the_second_input_of_a_merge_says_where_it_belongs(page: Page) -> None:
    _open_small(page, seed=9)
    page.run(
        "const find = (kind) => app.rootGraph.nodes.find((n) => n.comfyClass === kind);"
        " const merge = LiteGraph.createNode('ModelMergeSimple'); app.rootGraph.add(merge);"
        " find('CheckpointLoaderSimple').connect(0, merge, 0);"
        f" {NODE}.connect(0, merge, 1); merge.connect(0, find('KSampler'), 0);"
        f" {NODE}.widgets.find((w) => w.name === 'graphs').value = 'lent'"
    )
    page.run_workflow()
    box = f"{NODE}.widgets.find((w) => w.name === 'warmgraph_status').element"
    page.wait_for(f"{box}.innerText.includes('Nothing in the last prompt used')")


def test_a_node_whose_model_is_gone_says_so(page: Page, server: Server) -> None:
    _open_small(page, seed=5)
    page.run_workflow()
    page.wait_for(f"{STATUS}.some((text) => / a step|faster|parts/.test(text))")
    server.request("/free", {"unload_models": True, "free_memory": True})
    page.wait_for("!(await (await fetch('/warmgraph/report')).json()).models.length")
    page.run("(await import('/extensions/warmgraph/js/reports.js')).refreshReports()")
    page.wait_for(f"{STATUS}.some((text) => /No longer loaded/.test(text))")
