"""The command that makes a workflow faster, on the host's own templates and on what people make of
them, in a real Chromium: what is asked of the prompt that the page makes then, and of one Undo.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from warmgraph_tools.host import Server
from warmgraph_tools.page import Page

MODEL, VAE = "WarmgraphCompileModel", "WarmgraphCompileVAE"
MAKE, MAKE_VAE, REMOVE = (f"Warmgraph.{name}" for name in ("MakeFaster", "MakeFasterVAE", "Remove"))

#: An official template of each: loader in a subgraph, two models in one, all in the open.
IN_SUBGRAPH, TWO_MODELS, IN_THE_OPEN = (
    "image_z_image_turbo",
    "video_wan2_2_14B_i2v",
    "sdxl_simple_example",
)

#: They load a model to find poses or masks by it: no sampler takes one.
WITHOUT_SAMPLER = (
    "gsl_starter",
    "utility_sdpose",
    "utility_image_segment",
    "utility_video_segment",
)

#: In the page: the workflow as Undo has to bring it back. The host counts `order` anew with each
#: Undo, whatever was changed, and `ds` is what part of the canvas is in view.
WORKFLOW = """((s) => { delete s.extra?.ds; return s; })(JSON.parse(JSON.stringify(
    app.rootGraph.serialize(), (key, value) => key === 'order' ? undefined : value)))"""
GRAPHS = "[app.rootGraph, ...app.rootGraph.subgraphs.values()]"
OURS = f"{GRAPHS}.flatMap((g) => g.nodes).filter((n) => /^Warmgraph/.test(n.comfyClass))"
TOASTS = "[...document.querySelectorAll('.p-toast-message-text')].map((e) => e.innerText)"


def _templates_folder() -> Path | None:
    found = importlib.util.find_spec("comfyui_workflow_templates_json")
    return Path(found.origin).parent / "templates" if found and found.origin else None


def _nodes(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    subgraphs = (workflow.get("definitions") or {}).get("subgraphs", [])
    return [node for graph in (workflow, *subgraphs) for node in graph["nodes"]]


def _loads_a_model(workflow: dict[str, Any]) -> bool:
    """Whether a node of it gives a MODEL and takes none."""

    def slots(node: dict[str, Any], side: str) -> set[str]:
        return {str(slot.get("type")) for slot in node.get(side) or []}

    return any(
        "MODEL" in slots(node, "outputs") - slots(node, "inputs") for node in _nodes(workflow)
    )


def _read(name: str) -> dict[str, Any]:
    folder = _templates_folder()
    assert folder is not None
    return dict(json.loads((folder / f"{name}.json").read_text("utf-8")))


def _official() -> list[Any]:
    """Every fourth of the host's templates that load a model; a quarter of them in each run."""
    folder = _templates_folder()
    names = []
    for file in sorted(folder.glob("*.json")) if folder else ():
        text = file.read_text("utf-8")
        if '"MODEL"' in text and _loads_a_model(json.loads(text)):
            names.append(file.stem)
    every_fourth = names[::4]
    slow = pytest.mark.slow
    return [pytest.param(n, marks=[slow] if k % 4 else []) for k, n in enumerate(every_fourth)]


@pytest.fixture(scope="module")
def page(browse: Callable[[Server], Page], server: Server) -> Page:
    if _templates_folder() is None:
        pytest.skip(
            "no package comfyui-workflow-templates-json here: the host's requirements have it"
        )
    return browse(server)


@pytest.fixture
def quiet(page: Page) -> Page:
    """The page, with nothing said yet and nothing open over its canvas."""
    page.run(
        "app.extensionManager.toast.removeAll();"
        " document.querySelectorAll('.litecontextmenu').forEach((e) => e.remove())"
    )
    page.wait_for(f"!{TOASTS}.length")
    return page


@pytest.fixture(scope="module")
def takers(server: Server) -> dict[str, list[str]]:
    """Classes of samplers and guiders, and which of their inputs take a MODEL."""
    found = {}
    for kind, info in server.object_info().items():
        given = set(info["output"])
        is_one = any(word in kind.lower() for word in ("sampler", "guider"))
        if not is_one or "MODEL" in given or given <= {"SIGMAS", "SAMPLER"}:
            continue
        inputs = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
        found[kind] = [name for name, (kind_taken, *_) in inputs.items() if kind_taken == "MODEL"]
    return found


def _open(page: Page, workflow: dict[str, Any], name: str = "tried") -> None:
    page.run(
        f"await app.loadGraphData({json.dumps(workflow)}, true, true, {json.dumps(name)},"
        " { openSource: 'template' })"
    )


def _prompt(page: Page) -> dict[str, Any]:
    return dict(page.run("return (await app.graphToPrompt()).output"))


def _do(page: Page, command: str) -> None:
    page.run(f"await app.extensionManager.command.execute({command!r})")


def _undo(page: Page, before: dict[str, Any], *, less: tuple[str, ...] = ()) -> None:
    """One Undo brings the workflow back, links and subgraphs included.

    Args:
        less: how the places end at which it may differ.
    """
    _do(page, "Comfy.Undo")
    # The host finds the types of nodes that take any a moment after it has loaded them.
    deadline = time.monotonic() + 5
    while _state(page) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    left = _differences(before, _state(page))
    assert [text for text in left if not text.split(":")[0].endswith(less)] == []


def _differences(a: Any, b: Any, place: str = "") -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from _differences(a.get(key), b.get(key), f"{place}.{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _differences(one, other, f"{place}.{number}")
    elif a != b:
        yield f"{place}: {a} -> {b}"


def _state(page: Page) -> dict[str, Any]:
    return dict(page.run(f"return {WORKFLOW}"))


def _without(prompt: dict[str, Any], *kinds: str) -> dict[str, dict[str, Any]]:
    """A prompt in which what nodes of these classes take goes to where they gave it."""

    def origin(value: Any) -> Any:
        while isinstance(value, list) and _kind(prompt, value[0]) in kinds:
            inputs = prompt[value[0]]["inputs"]
            value = next(v for k, v in inputs.items() if k in ("model", "vae", "control_net"))
        return value

    return {
        key: {name: origin(value) for name, value in node["inputs"].items()}
        for key, node in prompt.items()
        if _kind(prompt, key) not in kinds
    }


def _kind(prompt: dict[str, Any], key: str) -> str:
    """A node's class; the page sends nodes of classes that it does not know without one."""
    return str(prompt.get(key, {}).get("class_type", ""))


def _users(prompt: dict[str, Any], takers: dict[str, list[str]]) -> dict[str, str]:
    """Inputs of samplers and guiders that take a MODEL: what class feeds each."""
    return {
        f"{key} {node['class_type']}.{name}": _kind(prompt, node["inputs"][name][0])
        for key, node in prompt.items()
        for name in takers.get(_kind(prompt, key), ())
        if isinstance(node["inputs"].get(name), list)
    }


def _lies_on_nothing(page: Page) -> None:
    overlaps = page.run(
        f"""
        const box = ({{ pos: [x, y], size: [w, h], flags }}) =>
          flags?.collapsed ? [x, y - 30, 160, 30] : [x, y - 30, w, h + 30];
        return {OURS}.flatMap((node) => node.graph.nodes.filter((other) => {{
          const [a, b] = [box(node), box(other)];
          return other !== node && a[0] < b[0] + b[2] && b[0] < a[0] + a[2]
            && a[1] < b[1] + b[3] && b[1] < a[1] + a[3];
        }}).map((other) => `${{node.title}} lies on ${{other.title}}`));
        """
    )
    assert overlaps == []


def _try_command(
    page: Page, takers: dict[str, list[str]], workflow: dict[str, Any], **undone: Any
) -> None:
    _open(page, workflow)
    before, plain = _state(page), _prompt(page)
    wanted = _users(plain, takers)
    _do(page, MAKE)
    faster = _prompt(page)
    assert list(_users(faster, takers)) == list(wanted)
    assert set(_users(faster, takers).values()) <= {MODEL}, _users(faster, takers)
    assert _without(faster, MODEL) == _without(plain), "nothing else is linked in another way"
    _lies_on_nothing(page)
    said = page.wait_for(f"{TOASTS}.at(-1)")
    if wanted:
        count = len(page.run(f"return {OURS}.map((n) => n.id)"))
        assert f"{count} node{'s' * (count > 1)} added, in " in said
        _undo(page, before, **undone)
    else:
        assert "No sampler that takes a model was found" in said
        assert _state(page) == before


@pytest.mark.parametrize("name", _official())
def test_each_sampler_of_an_official_template_is_fed_and_one_undo_takes_it_back(
    quiet: Page, takers: dict[str, list[str]], name: str
) -> None:
    workflow = _read(name)
    _try_command(quiet, takers, workflow)
    assert name.startswith(WITHOUT_SAMPLER) or _users(_prompt(quiet), takers)


@pytest.mark.parametrize(
    "name",
    [IN_SUBGRAPH, *(pytest.param(n, marks=pytest.mark.slow) for n in (TWO_MODELS, IN_THE_OPEN))],
)
def test_it_is_right_with_the_newer_nodes_too(
    quiet: Page, takers: dict[str, list[str]], name: str
) -> None:
    quiet.set_setting("Comfy.VueNodes.Enabled", True)
    try:
        # The page gives the newer nodes their sizes as it shows them.
        _try_command(quiet, takers, _read(name), less=(".size.0", ".size.1"))
    finally:
        quiet.set_setting("Comfy.VueNodes.Enabled", False)


@pytest.mark.parametrize(("name", "nodes"), [(IN_SUBGRAPH, 1), (TWO_MODELS, 2), (IN_THE_OPEN, 2)])
def test_one_key_does_it_and_the_toast_goes_there(quiet: Page, name: str, nodes: int) -> None:
    """One action, where by hand it was nine, sixteen and seven."""
    _open(quiet, _read(name))
    quiet.run("document.activeElement?.blur()")
    for kind in ("rawKeyDown", "keyUp"):
        quiet.send(
            "Input.dispatchKeyEvent",
            type=kind, key="w", code="KeyW", windowsVirtualKeyCode=87, modifiers=1,
        )  # fmt: skip
    quiet.wait_for(f"{OURS}.length === {nodes}")
    quiet.click_first(".p-toast-message-text .warmgraph-button", "true")
    quiet.wait_for(f"{OURS}.some((n) => n.graph === app.canvas.graph && n.is_selected)")
    in_view = """(({ pos, size }) => {
      const { offset, scale, element } = app.canvas.ds;
      const [x, y] = pos.map((each, axis) => (each + offset[axis]) * scale);
      return x > 0 && y > 0 && x + size[0] * scale < element.clientWidth
        && y + size[1] * scale < element.clientHeight && scale <= 1.01;
    })"""
    quiet.wait_for(f"{OURS}.some((n) => n.is_selected && {in_view}(n))")


def _twice(page: Page) -> str:
    """Use the subgraph of the open workflow a second time; returns the new use's id."""
    again = str(
        page.run(
            """
            const use = app.rootGraph.nodes.find((n) => n.subgraph);
            const again = LiteGraph.createNode(use.subgraph.id);
            app.rootGraph.add(again);
            again.pos = [use.pos[0], use.pos[1] + use.size[1] + 100];
            return again.id;
            """
        )
    )
    _open(page, page.run("return app.rootGraph.serialize()"))  # as the host saves it
    return again


def test_a_subgraph_that_is_used_twice_gets_one_node(
    quiet: Page, takers: dict[str, list[str]]
) -> None:
    _open(quiet, _read(IN_SUBGRAPH))
    _twice(quiet)
    before, plain = _state(quiet), _prompt(quiet)
    assert len(_users(plain, takers)) == 2
    _do(quiet, MAKE)
    faster = _prompt(quiet)
    assert set(_users(faster, takers).values()) == {MODEL} and len(_users(faster, takers)) == 2
    assert quiet.run(f"return {OURS}.length") == 1
    _undo(quiet, before)


def _sampler_in_a_subgraph(page: Page) -> None:
    """Our first template without our nodes, the sampler alone in a subgraph."""
    page.open_shipped("text_to_image")
    _do(page, REMOVE)
    page.run(
        """
        const sampler = app.rootGraph.nodes.find((n) => n.comfyClass === 'KSampler');
        app.rootGraph.convertToSubgraph(new Set([sampler]));
        """
    )


def test_a_model_that_comes_into_a_subgraph_is_compiled_in_there(
    quiet: Page, takers: dict[str, list[str]]
) -> None:
    _sampler_in_a_subgraph(quiet)
    before, plain = _state(quiet), _prompt(quiet)
    _do(quiet, MAKE)
    faster = _prompt(quiet)
    assert set(_users(faster, takers).values()) == {MODEL}
    assert _without(faster, MODEL) == _without(plain)
    assert quiet.run(f"return {OURS}.every((n) => n.graph !== app.rootGraph)")
    _undo(quiet, before)
    _do(quiet, MAKE)
    _do(quiet, REMOVE)
    assert _prompt(quiet) == plain


@pytest.mark.parametrize("mode", [4, 2], ids=["bypassed", "muted"])
def test_a_compile_model_that_is_there_but_off_is_switched_on(quiet: Page, mode: int) -> None:
    quiet.open_shipped("text_to_image")
    plain = _prompt(quiet)
    quiet.run(f"{OURS}.find((n) => n.comfyClass === {MODEL!r}).mode = {mode}")
    before = _state(quiet)
    assert MODEL not in {node["class_type"] for node in _prompt(quiet).values()}
    _do(quiet, MAKE)
    assert _prompt(quiet) == plain
    assert "1 node switched on, in this workflow" in quiet.wait_for(f"{TOASTS}.at(-1)")
    _undo(quiet, before)


def test_where_there_is_nothing_to_do_it_says_why(quiet: Page) -> None:
    quiet.open_shipped("text_to_image")
    before = _state(quiet)
    _do(quiet, MAKE)
    said = quiet.wait_for(f"{TOASTS}.at(-1)")
    assert "nothing to add" in said and "is there already" in said
    assert _state(quiet) == before
    quiet.run("app.extensionManager.toast.removeAll(); app.rootGraph.clear()")
    quiet.wait_for(f"!{TOASTS}.length")
    _do(quiet, MAKE)
    assert "No sampler that takes a model was found" in quiet.wait_for(f"{TOASTS}.at(-1)")
    quiet.run("app.extensionManager.toast.removeAll()")
    quiet.wait_for(f"!{TOASTS}.length")
    _do(quiet, REMOVE)
    assert "has none of its nodes" in quiet.wait_for(f"{TOASTS}.at(-1)")


def test_a_server_that_does_not_answer_is_told_and_nothing_is_changed(quiet: Page) -> None:
    _open(quiet, _read(IN_SUBGRAPH))
    before = _state(quiet)
    quiet.send("Network.enable")
    quiet.send("Network.setBlockedURLs", urls=["*/warmgraph/places"])
    try:
        _do(quiet, MAKE)
        assert "The server does not answer." in quiet.wait_for(f"{TOASTS}.at(-1)")
        assert _state(quiet) == before
    finally:
        quiet.send("Network.setBlockedURLs", urls=[])
        quiet.send("Network.disable")
    quiet.errors[:] = [text for text in quiet.errors if "ERR_BLOCKED_BY_CLIENT" not in text]


def test_vaes_get_theirs_where_that_was_asked_for(
    quiet: Page, takers: dict[str, list[str]]
) -> None:
    _open(quiet, _read(IN_SUBGRAPH))
    before, plain = _state(quiet), _prompt(quiet)
    _do(quiet, MAKE_VAE)
    faster = _prompt(quiet)
    decodes = [n["inputs"]["vae"][0] for n in faster.values() if n["class_type"] == "VAEDecode"]
    assert decodes and {faster[key]["class_type"] for key in decodes} == {VAE}
    assert set(_users(faster, takers).values()) == {MODEL}
    assert _without(faster, MODEL, VAE) == _without(plain)
    _lies_on_nothing(quiet)
    _undo(quiet, before)


@pytest.mark.parametrize("name", ["deepcache", "img2img_hires", "vae_tiled_decode", "controlnet"])
def test_warmgraph_is_taken_out_of_a_workflow_by_one_command(quiet: Page, name: str) -> None:
    quiet.open_shipped(name)
    before, faster = _state(quiet), _prompt(quiet)
    ours = {n["class_type"] for n in faster.values() if n["class_type"].startswith("Warmgraph")}
    _do(quiet, REMOVE)
    left = _prompt(quiet)
    assert {key: node["inputs"] for key, node in left.items()} == _without(faster, *ours)
    assert quiet.run(f"return {OURS}.length") == 0
    _undo(quiet, before)
    assert _prompt(quiet) == faster


def test_a_node_alone_in_its_subgraph_is_bypassed_instead(quiet: Page) -> None:
    """The host links no input of a subgraph straight to its output."""
    quiet.open_shipped("text_to_image")
    plain = _prompt(quiet)
    quiet.run(
        f"app.rootGraph.convertToSubgraph(new Set([{OURS}"
        f".find((n) => n.comfyClass === {MODEL!r})]))"
    )
    _do(quiet, REMOVE)
    ours = {n["class_type"] for n in plain.values() if n["class_type"].startswith("Warmgraph")}
    left = {key: node["inputs"] for key, node in _prompt(quiet).items()}
    assert left == _without(plain, *ours)


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
    _do(quiet, REMOVE)
    quiet.run(
        "Object.assign(app.canvas.ds, { scale: 0.6, offset: [350, 250] });"
        " app.canvas.setDirty(true, true); app.extensionManager.toast.removeAll()"
    )
    quiet.wait_for(f"!{TOASTS}.length && app.canvas.renderedPaths.size")
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
        before = _state(own)
        own.mouse(*_on_screen(own, pointed), button="right")
        own.click_first(
            ".litemenu-entry, [role=menuitem] span",
            f"e.checkVisibility() && e.innerText.trim() === {entry!r}",
        )
        fed = f"app.rootGraph.getNodeById(app.rootGraph.getLink({user}.link).origin_id)"
        own.wait_for(f"{fed}.comfyClass === {kind!r}")
        assert own.run(f"return {OURS}.length") == 1
        _lies_on_nothing(own)
        _undo(own, before, less=(".size.0", ".size.1") if newer else ())
    finally:
        own.set_setting("Comfy.VueNodes.Enabled", False)


def test_a_links_reroutes_stay_where_they_are(own: Page) -> None:
    own.run(
        f"const link = app.rootGraph.getLink({SAMPLER}.inputs[0].link);"
        " app.rootGraph.createReroute([300, -100], link)"
    )
    before, plain = _state(own), _prompt(own)
    reroutes = before["extra"]["reroutes"]
    _do(own, MAKE)
    faster = _state(own)
    assert MODEL in {node["class_type"] for node in _prompt(own).values()}
    assert [(each["id"], each["pos"]) for each in faster["extra"]["reroutes"]] == [
        (each["id"], each["pos"]) for each in reroutes
    ]
    _do(own, REMOVE)
    assert _prompt(own) == plain
    assert len(_state(own)["extra"]["reroutes"]) == len(reroutes)
    _undo(own, faster)
    _undo(own, before)


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
    _do(own, MAKE)
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
