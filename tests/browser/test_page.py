"""The page in a real Chromium: a user opens a shipped workflow, saves it and runs it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from warmgraph_backends.sessions.settings import SETTINGS
from warmgraph_backends.storing.folders import NOTICE
from warmgraph_console.convert import to_prompt
from warmgraph_tools import templates, thumbnails
from warmgraph_tools.host import Server
from warmgraph_tools.page import OPEN, SIDE_PANEL, STATUS, Page

ROOT = Path(__file__).resolve().parents[2]
NAME = "my first"


@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_a_shipped_workflow_opens_unmodified_as_its_file_says_and_is_sent_as_we_convert_it(
    page: Page, server: Server, name: str
) -> None:
    """Nodes larger than there would lie on others; tests/unit/test_workflow_files.py looks at the
    files.
    """
    workflow = templates.read(name)
    page.open_shipped(name)
    graphs = "[app.rootGraph, ...(app.rootGraph.subgraphs?.values() ?? [])]"
    nodes = f"{graphs}.flatMap((graph) => graph.nodes)"
    shown = page.run(f"return {nodes}.map((n) => [String(n.id), [...n.size]])")
    listed = templates.all_nodes(workflow)
    assert dict(shown) == {str(node["id"]): node["size"] for node in listed}

    time.sleep(0.5)
    page.run(f"{OPEN}.changeTracker.checkState?.() ?? {OPEN}.changeTracker.captureCanvasState?.()")
    assert page.run(f"return {OPEN}.isModified") is False
    # Another test may have run this workflow on this server.
    boxes = f"{nodes}.flatMap((n) => n.widgets?.find((w) => w.name === 'warmgraph_status') ?? [])"
    page.wait_for(
        f"{boxes}.some((w) => /Shown after the next run|parts/.test(w.element.innerText))"
    )

    sent = page.run("return JSON.parse(JSON.stringify((await app.graphToPrompt()).output))")
    made = to_prompt(workflow, server.object_info())
    assert {key: entry["class_type"] for key, entry in sent.items()} == {
        key: entry["class_type"] for key, entry in made.items()
    }
    for key, entry in made.items():
        # On newer hosts a choice may bring inputs of its own, which the file does not have.
        given = {k: v for k, v in sent[key]["inputs"].items() if k.partition(".")[0] == k}
        assert given == entry["inputs"], f"node {key} ({entry['class_type']})"


def test_a_user_saves_and_runs_a_shipped_workflow(
    page: Page, server: Server, tmp_path: Path
) -> None:
    workflows = server.base / "user" / "default" / "workflows"
    before = set(workflows.glob("*.graphs"))
    page.open_server()
    page.open_shipped("text_to_image")
    page.set_widget("KSampler", "steps", 1)
    for side in ("width", "height"):
        page.set_widget("EmptyLatentImage", side, 128)
    page.set_widget("KSampler", "control_after_generate", "fixed")
    page.run_workflow()
    assert set(workflows.glob("*.graphs")) == before, "a tab that was never saved has no folder"

    page.set_widget("KSampler", "seed", 2)  # or the host has nothing left to run
    page.set_widget("KSampler", "steps", 4)  # fewer say nothing of a step's time
    page.save_as(NAME)
    server.wait_until_built()
    page.wait_for(f"{STATUS}.some((text) => /: (\\d+) of \\1 parts compiled/.test(text))")  # live
    page.run_workflow()
    page.wait_for(f"{STATUS}.some((text) => /[0-9.]+ m?s a step/.test(text))")
    folder = workflows / f"{NAME}.graphs"
    deadline = time.monotonic() + 180
    while not (folder / NOTICE).exists() and time.monotonic() < deadline:  # it comes last
        time.sleep(0.2)
    names = [file.name for file in folder.iterdir()]
    assert any(name.endswith(".safetensors") for name in names), names
    assert [name for name in names if not name.startswith(".")] == [NOTICE]  # for people

    text = page.wait_for(f"{STATUS}.find((text) => /parts compiled/.test(text))")
    ((counted, *counts),) = re.findall(r"((\d+) of (\d+) parts compiled)", text)
    assert counts[0] == counts[1] and int(counts[1]) > 10, text
    (tmp_path / "run.png").write_bytes(page.screenshot())
    tab = f"app.extensionManager.workflow.getWorkflowByPath('workflows/{NAME}.json')"
    page.open_shipped("lora")
    is_shown = f"{STATUS}.some((text) => text.includes({counted!r}))"
    page.wait_for(f"!{is_shown}")
    page.run(f"await app.loadGraphData({tab}.activeState, true, true, {tab})")
    page.wait_for(is_shown)  # the tab's results came back with it
    assert page.run(f"return {OPEN}.isModified") is False, "neither texts nor the entry count"

    page.run("await app.extensionManager.command.execute('Workspace.ToggleSidebarTab.workflows')")
    page.run("await app.extensionManager.workflow.syncWorkflows?.()")
    listed = page.wait_for(
        f"(document.querySelector({SIDE_PANEL!r})?.innerText ?? '').includes({NAME!r})"
        f" && document.querySelector({SIDE_PANEL!r}).innerText"
    )
    assert ".graphs" not in listed and "safetensors" not in listed and NOTICE not in listed
    paths = page.run("return app.extensionManager.workflow.persistedWorkflows.map((w) => w.path)")
    assert f"workflows/{NAME}.json" in paths
    assert all(path.endswith(".json") for path in paths), paths
    assert page.own_errors() == []


def test_the_text_is_shown_by_the_newer_nodes_too(page: Page) -> None:
    page.run("await app.extensionManager.setting.set('Comfy.VueNodes.Enabled', true)")
    page.wait_for(
        "(() => { const e = document.querySelector('[data-node-id] .warmgraph-status');"
        " const r = e?.getBoundingClientRect(); return r && r.width > 50 && r.height > 20; })()"
    )
    page.run("await app.extensionManager.setting.set('Comfy.VueNodes.Enabled', false)")
    assert page.own_errors() == []


def test_images_carry_neither_the_path_nor_the_user(server: Server, page: Page) -> None:
    pictures = list((server.base / "output").rglob("*.png"))
    assert pictures, "the run before this test saved one"
    for picture in pictures:
        data = picture.read_bytes()
        assert b"workflow" in data and f"workflows/{NAME}.json".encode() not in data
    sent = page.run("return (await app.graphToPrompt()).workflow.extra.warmgraph")
    assert sent["path"] == f"workflows/{NAME}.json"
    assert page.run("return app.rootGraph.extra.warmgraph ?? null") is None


#: In the host's search: what is listed first, by its names for people.
FOUND = "document.querySelector('[role=option]')?.innerText.split('\\n')[0]"


def _search(page: Page, typed: str) -> str:
    """Type it into the host's search box, and return what it lists first."""
    page.run("document.activeElement.select()")
    page.type_text("nothing is called so")
    page.wait_for("!document.querySelector('[role=option]')")
    page.run("document.activeElement.select()")
    page.type_text(typed)
    return str(page.wait_for(FOUND))


@pytest.mark.parametrize(("language", "said"), [("en", "Compile Model"), ("zh", "编译模型")])
def test_the_hosts_search_lists_compile_model_first(page: Page, language: str, said: str) -> None:
    """But where a node of the host's own is called what was typed, or nearly so."""
    page.set_setting("Comfy.Locale", language)
    page.open_server()  # older pages translate names of nodes as they load
    try:
        page.run("await app.extensionManager.command.execute('Workspace.SearchBox.Toggle')")
        page.wait_for("document.activeElement.role === 'combobox'")
        words = "warmgraph compile speed faster accelerate optimize performance tensorrt 加速 编译"
        found = {typed: _search(page, typed) for typed in (*words.split(), "speed up")}
        assert found == dict.fromkeys(found, said)
        others = {typed: _search(page, typed) for typed in ("torch compile", "seed", "sampler")}
        assert said not in others.values(), others
        page.escape("[role=combobox]")
    finally:
        page.set_setting("Comfy.Locale", "en")
        page.open_server()


@pytest.mark.parametrize("is_new", [False, True], ids=["classic", "new"])
def test_choices_are_called_by_names_that_people_know_and_sent_as_they_are(
    page: Page, is_new: bool
) -> None:
    page.set_setting("Comfy.VueNodes.Enabled", is_new)
    try:
        page.open_shipped("text_to_image")
        node = "app.rootGraph.nodes.find((n) => n.comfyClass === 'WarmgraphCompileModel')"
        for language, said in (("zh", "继续生成"), ("en", "go on")):
            page.set_setting("Comfy.Locale", language)
            page.wait_for(
                f"[...document.querySelectorAll('[data-node-id] *')]"
                f".some((e) => (e.value ?? e.innerText) === {said!r})"
                if is_new
                else f"{node}.widgets[0]._displayValue === {said!r}"
            )
        sent = page.run(f"return (await app.graphToPrompt()).output[{node}.id].inputs")
        chosen = {name: sent[name] for name in ("when_missing", "graphs", "backend", "form")}
        assert list(chosen.values()) == ["background", "", "auto", "auto"]
    finally:
        page.set_setting("Comfy.Locale", "en")
        page.set_setting("Comfy.VueNodes.Enabled", False)


def test_a_setting_changed_in_the_page_reaches_the_server(page: Page, server: Server) -> None:
    shown = page.run(
        "const setting = app.ui.settings.settingsLookup['Warmgraph.Store.Cap'];"
        " return [setting.defaultValue, setting.attrs.min, setting.attrs.max];"
    )
    assert shown == [4, 0.1, 1024]
    controls = page.run(
        "const all = Object.values(app.ui.settings.settingsLookup)"
        ".filter((setting) => setting.id.startsWith('Warmgraph.'));"
        " return Object.fromEntries(all.map(({ id, type }) => [id.slice(10), type]));"
    )
    kinds = {"number": "number", "slider": "slider", "toggle": "boolean"}
    assert controls == {s.place: kinds[s.control] for s in SETTINGS.values()}
    keep = "await app.extensionManager.setting.set('Warmgraph.Captured.Keep', {})"
    for value in ("false", "true"):
        page.run(keep.format(value))
        page.wait_for(
            f"(await (await fetch('/warmgraph/report')).json()).settings.keep_captured === {value}"
        )
    set_workers = "await app.extensionManager.setting.set('Warmgraph.Builder.Workers', {})"
    page.run(set_workers.format(1))
    page.wait_for("(await (await fetch('/warmgraph/report')).json()).settings.workers === 1")
    settings = "app.extensionManager.setting"
    page.run(  # changed back before the server has answered
        f"for (const keep of [false, true]) void {settings}.set('Warmgraph.Captured.Keep', keep);"
        f" void {settings}.set('Warmgraph.Builder.Workers', 3)"
    )
    page.wait_for("(await (await fetch('/warmgraph/report')).json()).settings.workers === 3")
    assert server.report()["settings"]["keep_captured"] is True
    server.request("/warmgraph/settings", {"workers": 2})
    page.open_server()
    page.wait_for("app.extensionManager.setting.get('Warmgraph.Builder.Workers') === 2")
    page.run(set_workers.format(0))
    page.wait_for("(await (await fetch('/warmgraph/report')).json()).settings.workers === 0")


def test_texts_change_with_the_pages_language_at_once(page: Page) -> None:
    """Though the host tells of another language before it has taken it."""
    page.open_shipped("text_to_image")
    for language, chinese in (("zh", "true"), ("en", "false")):
        page.set_setting("Comfy.Locale", language)
        # What stands there hangs on what ran before: a run's figures, or that there was none.
        page.wait_for(
            f"((shown) => shown.length === 1"
            f" && shown.every((text) => /[\u4e00-\u9fff]/.test(text) === {chinese}))({STATUS})"
        )


def test_a_reason_is_told_in_the_pages_language(page: Page) -> None:
    page.open_shipped("text_to_image")
    page.set_widget("WarmgraphCompileModel", "backend", "eager")
    page.set_widget("KSampler", "steps", 1)
    for side in ("width", "height"):
        page.set_widget("EmptyLatentImage", side, 64)
    page.run_workflow()
    for language, said in (("zh", "编译器已关闭"), ("en", "the compiler is off, to compare")):
        page.set_setting("Comfy.Locale", language)
        page.wait_for(f"{STATUS}.some((text) => text.includes({said!r}))")


def test_groups_of_settings_are_named_in_the_pages_language(page: Page) -> None:
    """Also in one that Warmgraph does not speak: there they are in English."""
    heads = "[...document.querySelectorAll('[role=dialog] h3')].map((e) => e.innerText)"
    for language, named in (("zh", "专家选项"), ("ja", "For experts"), ("en", "For experts")):
        page.set_setting("Comfy.Locale", language)
        page.run("void app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
        page.click_first("[role=dialog] nav *", "!e.children.length && e.innerText === 'Warmgraph'")
        shown = page.wait_for(f"{heads}.includes({named!r}) && {heads}")
        assert shown[-1] == named, "experts come last"
        assert not any("Warmgraph" in head for head in shown)
        page.escape("[role=dialog]")


def test_a_report_made_before_the_sampling_tells_of_the_run_once_it_has_ended(page: Page) -> None:
    """Of DeepCache, too: a report whose `after` nobody linked is made first of all. What it said of
    two latents stays as it was.
    """
    page.open_server()
    page.open_shipped("deepcache")
    page.set_widget("WarmgraphCompileModel", "when_missing", "never")
    page.set_widget("KSampler", "steps", 4)
    for side in ("width", "height"):
        page.set_widget("EmptyLatentImage", side, 64)
    page.run(
        """
        const report = LiteGraph.createNode("WarmgraphGraphReport");
        app.rootGraph.add(report);
        app.rootGraph.nodes.find((n) => n.comfyClass === "WarmgraphDeepCache")
          .connect(0, report, 0);
        const empty = app.rootGraph.nodes.find((n) => n.comfyClass === "EmptyLatentImage");
        for (const name of ["latent", "compared_with"])
          empty.connect(0, report, report.inputs.findIndex((input) => input.name === name));
        """
    )
    page.run_workflow()
    page.wait_for(f"{STATUS}.filter((t) => /DeepCache, last run: .*full/.test(t)).length === 2")
    report = page.wait_for(f"{STATUS}.find((t) => /parts compiled[^]*DeepCache, last/.test(t))")
    assert "compiled graphs: " in report and page.own_errors() == []
    assert report.splitlines()[-1] == "latents: the same, bit for bit"


def test_the_templates_page_finds_ours_by_our_name_the_simplest_one_first(page: Page) -> None:
    titles = [templates.title(key) for key in templates.TEMPLATES]
    page.resize(1400, 900)
    page.open_server()
    page.run("void app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    entry = "[role=dialog] input[type=text], [role=dialog] input[type=search], [role=dialog] input"
    cards = (
        "[...document.querySelectorAll('[role=dialog] h3')].map((e) => e.innerText.trim())"
        ".filter((text) => text !== text.toUpperCase())"  # headings at the side
    )
    page.wait_for(f"document.querySelector({entry!r}) && {cards}.length > 5")
    page.run(f"document.querySelector({entry!r}).focus()")
    page.type_text("warmgraph")
    found = f"((all) => all.length > 5 && all.every((e) => /^warmgraph/.test(e)) && all)({cards})"
    shown = page.wait_for(found)
    assert shown[0] == titles[0] and set(shown) <= set(titles)
    sides = "[...document.querySelectorAll('[role=dialog] img')].map((e) => e.naturalWidth)"
    page.wait_for(f"{sides}.filter((side) => side === {thumbnails.SIDE}).length > 0")
    page.escape("[role=dialog]")
    assert page.own_errors() == []


def test_a_button_that_moves_away_from_under_the_mouse_is_pressed_again(page: Page) -> None:
    page.run(
        """
        const button = document.createElement('button');
        button.id = 'moves';
        button.style = 'position: fixed; z-index: 9999; left: 300px; top: 300px';
        button.onmousedown = () => { button.style.left = '600px'; };
        button.onclick = () => { window.presses = (window.presses ?? 0) + 1; };
        document.body.append(button);
        """
    )
    page.click("#moves")
    assert page.run("return window.presses") == 1
    page.run("document.querySelector('#moves').remove()")
