"""The command that makes a workflow faster where one points: menus of nodes, links and the canvas,
a dropped link, the tab, and the host's list of commands; in a real Chromium.
"""

from __future__ import annotations

import pytest

from warmgraph_tools.page import Page

from .faster import MAKE, MODEL, OURS, REMOVE, VAE, do, lies_on_nothing, sent, settle, state, undo


def _on_screen(page: Page, place: str) -> tuple[float, float]:
    """Where in the window a place of the canvas is, which a script gives as [x, y]."""
    x, y = page.run(
        f"""
        const [x, y] = {place};
        const {{ offset, scale, element }} = app.canvas.ds;
        const {{ left, top }} = element.getBoundingClientRect();
        return [left + (x + offset[0]) * scale, top + (y + offset[1]) * scale];
        """
    )
    return x, y


@pytest.fixture
def own(quiet: Page) -> Page:
    """The page with a workflow of a checkpoint and a sampler in view, without a node of ours."""
    quiet.open_shipped("text_to_image")
    do(quiet, REMOVE)
    quiet.forget_toasts()
    settle(quiet)
    quiet.run("Object.assign(app.canvas.ds, { scale: 0.6, offset: [350, 250] })")
    quiet.run("app.canvas.draw(true, true)")  # what is pointed at is found among what was drawn
    assert quiet.run("return app.canvas.renderedPaths.size")
    return quiet


def _node(kind: str) -> str:
    return f"app.rootGraph.nodes.find((n) => n.comfyClass === {kind!r})"


TITLE_OF = "(({{ pos }}) => [pos[0] + 120, pos[1] - 12])({})"
LOADER, SAMPLER, DECODE = map(_node, ("CheckpointLoaderSimple", "KSampler", "VAEDecode"))


@pytest.mark.parametrize(
    ("pointed", "entry", "user", "kind"),
    [
        (TITLE_OF.format(LOADER), "Compile Model here", f"{SAMPLER}.inputs[0]", MODEL),
        (TITLE_OF.format(SAMPLER), "Compile Model here", f"{SAMPLER}.inputs[0]", MODEL),
        (TITLE_OF.format(DECODE), "Compile VAE here", f"{DECODE}.inputs[1]", VAE),
        (
            f"app.rootGraph.getLink({SAMPLER}.inputs[0].link)._pos",
            "Compile Model here",
            f"{SAMPLER}.inputs[0]",
            MODEL,
        ),
        ("[200, 1000]", "Make this workflow faster", f"{SAMPLER}.inputs[0]", MODEL),
    ],
    ids=["loader", "sampler", "decode", "link", "canvas"],
)
@pytest.mark.parametrize(
    "newer",
    [
        pytest.param(False, id="canvas nodes"),
        pytest.param(True, id="newer nodes", marks=pytest.mark.slow),
    ],
)
def test_menus_offer_it_where_one_points(
    own: Page, pointed: str, entry: str, user: str, kind: str, newer: bool
) -> None:
    own.set_setting("Comfy.VueNodes.Enabled", newer)
    try:
        before = state(own)
        if "_pos" in pointed and own.frontend >= (1, 55):
            pytest.skip("links have a menu of the page's own there, which takes no entries")
        own.mouse(*_on_screen(own, pointed), button="right")
        own.click_first(
            ".litemenu-entry, [role=menuitem] span",
            f"e.checkVisibility() && e.innerText.trim() === {entry!r}",
        )
        fed = f"app.rootGraph.getNodeById(app.rootGraph.getLink({user}.link).origin_id)"
        own.wait_for(f"{fed}.comfyClass === {kind!r}")
        assert own.run(f"return {OURS}.length") == 1
        lies_on_nothing(own)
        undo(own, before, less=(".size.0", ".size.1") if newer else ())
    finally:
        own.set_setting("Comfy.VueNodes.Enabled", False)


def test_a_links_reroutes_stay_where_they_are(own: Page) -> None:
    own.run(
        f"const link = app.rootGraph.getLink({SAMPLER}.inputs[0].link);"
        " app.rootGraph.createReroute([300, -100], link)"
    )
    before, plain = state(own), sent(own)
    reroutes = before["extra"]["reroutes"]
    do(own, MAKE)
    faster = state(own)
    assert MODEL in {node["class_type"] for node in sent(own).values()}
    assert [(each["id"], each["pos"]) for each in faster["extra"]["reroutes"]] == [
        (each["id"], each["pos"]) for each in reroutes
    ]
    do(own, REMOVE)
    assert sent(own) == plain
    assert len(state(own)["extra"]["reroutes"]) == len(reroutes)
    undo(own, faster)
    undo(own, before)


def test_the_menu_of_a_dropped_link_lists_compile_model_by_its_name(own: Page) -> None:
    start = _on_screen(own, f"{LOADER}.getOutputPos(0)")
    own.drag(start, _on_screen(own, "[300, 1000]"))
    own.click_first(".litemenu-entry", "e.innerText.trim() === 'Compile Model'")
    own.wait_for(f"{OURS}.length === 1")
    link = own.run(f"return {OURS}[0].inputs[0].link !== null && {OURS}[0].title")
    assert link == "Compile Model"
    own.set_setting("Comfy.NodeSuggestions.number", 3)  # the host makes its list anew
    listed = "LiteGraph.slot_types_default_out.MODEL"
    own.wait_for(f"{listed}.length === 4 && {listed}.some((e) => e.content === 'Compile Model')")
    own.set_setting("Comfy.NodeSuggestions.number", 5)


def test_the_tab_offers_it_while_no_model_runs_through_us(own: Page) -> None:
    own.run("await app.extensionManager.command.execute('Workspace.ToggleSidebarTab.warmgraph')")
    own.wait_for("!!document.querySelector('.warmgraph-tab')")
    own.run(  # models of earlier tests would stand in its place
        "app.api.dispatchCustomEvent('warmgraph.report', { models: [], deepcaches: [] });"
        "document.querySelector(\".warmgraph-tab [data-action='make-faster']\").click()"
    )
    own.wait_for(f"{OURS}.length === 1")
    own.run("await app.extensionManager.command.execute('Workspace.ToggleSidebarTab.warmgraph')")


def test_a_model_that_is_slower_here_can_be_bypassed_from_the_tab_and_nothing_else(
    own: Page,
) -> None:
    do(own, MAKE)
    own.wait_for(f"{OURS}.length === 1")
    own.run("await app.extensionManager.command.execute('Workspace.ToggleSidebarTab.warmgraph')")
    own.wait_for("!!document.querySelector('.warmgraph-tab')")
    press = """
        const model = { id: 'slow', model: 'SDXL', stage: 'slower', factor: 0.5, lines: [],
          standing: 'compiled', by: 'node', nodes: [{ workflow: %s, node: String(%s.id) }] };
        app.api.dispatchCustomEvent('warmgraph.report', { models: [model], deepcaches: [] });
        document.querySelector(".warmgraph-tab [data-action='bypass']").click();
    """
    here, sampler = "String(app.rootGraph.id)", _node("KSampler")
    for workflow, node in (("null", f"{OURS}[0]"), (here, sampler)):  # another's, and not ours
        own.run(press % (workflow, node))
    assert own.run(f"return [{OURS}[0].mode, {sampler}.mode]") == [0, 0]
    own.run(press % (here, f"{OURS}[0]"))
    own.wait_for(f"{OURS}[0].mode === 4")
    own.run("await app.extensionManager.command.execute('Comfy.Undo')")
    own.wait_for(f"{OURS}.length === 1 && {OURS}[0].mode === 0")
    own.run("await app.extensionManager.command.execute('Workspace.ToggleSidebarTab.warmgraph')")


def test_the_host_lists_the_commands_in_the_pages_language(own: Page) -> None:
    label = f"app.extensionManager.command.commands.find(({{ id }}) => id === {MAKE!r}).label"
    assert own.run(f"return {label}") == "Make this workflow faster"
    own.set_setting("Comfy.Locale", "zh")
    try:
        own.wait_for(f"{label} === '加速此工作流'")
    finally:
        own.set_setting("Comfy.Locale", "en")
    # The host has much to say of pictures and models that its templates have and nobody else here.
    assert [text for text in own.errors if "/extensions/warmgraph/" in text] == []
