"""The command that makes a workflow faster, on the host's own templates and on what people make of
them, in a real Chromium: what is asked of the prompt that the page makes then, and of one Undo.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from warmgraph_tools.host import Server
from warmgraph_tools.page import TOAST, TOASTS, Page

from .faster import (
    ADD_STEP_CACHE,
    CONTROL_NET,
    GRAPHS,
    MAKE,
    MAKE_ALL,
    MODEL,
    OURS,
    REMOVE,
    STEP_CACHE,
    VAE,
    do,
    lies_on_nothing,
    sent,
    settle,
    state,
    undo,
)

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
    if folder is None:
        pytest.skip(
            "no package comfyui-workflow-templates-json here: the host's requirements have it"
        )
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


def test_nothing_is_called_that_the_page_deprecates(quiet: Page) -> None:
    _open(quiet, _read(IN_SUBGRAPH))
    quiet.run(
        """
        window.deprecated = [];
        LiteGraph.alwaysRepeatWarnings = true;
        window.noteOurs = (message) => {
          if (/extensions.warmgraph/.test(new Error().stack)) window.deprecated.push(message);
        };
        LiteGraph.onDeprecationWarning.push(window.noteOurs);
        """
    )
    try:
        do(quiet, MAKE)
        quiet.wait_for(f"{OURS}.length === 1")
        quiet.run(
            f"for (const n of {GRAPHS}.flatMap((g) => g.nodes)) app.canvas.getNodeMenuOptions(n)"
        )
        do(quiet, MAKE)
        do(quiet, REMOVE)
        quiet.wait_for(f"{OURS}.length === 0")
        assert quiet.run("return window.deprecated") == []
    finally:
        quiet.run(
            "LiteGraph.onDeprecationWarning.splice("
            "LiteGraph.onDeprecationWarning.indexOf(window.noteOurs), 1);"
            " LiteGraph.alwaysRepeatWarnings = false"
        )


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
    settle(page)


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


def _try_command(
    page: Page, takers: dict[str, list[str]], workflow: dict[str, Any], **undone: Any
) -> None:
    _open(page, workflow)
    before, plain = state(page), sent(page)
    wanted = _users(plain, takers)
    do(page, MAKE)
    faster = sent(page)
    assert list(_users(faster, takers)) == list(wanted)
    assert set(_users(faster, takers).values()) <= {MODEL}, _users(faster, takers)
    assert _without(faster, MODEL) == _without(plain), "nothing else is linked in another way"
    lies_on_nothing(page)
    if wanted:
        count = len(page.run(f"return {OURS}.map((n) => n.id)"))
        page.toast(f"{count} node{'s' * (count > 1)} added, in ")
        undo(page, before, **undone)
    else:
        page.toast("No sampler that takes a model was found")
        assert state(page) == before


@pytest.mark.parametrize("name", _official())
def test_each_sampler_of_an_official_template_is_fed_and_one_undo_takes_it_back(
    quiet: Page, takers: dict[str, list[str]], name: str
) -> None:
    workflow = _read(name)
    _try_command(quiet, takers, workflow)
    assert name.startswith(WITHOUT_SAMPLER) or _users(sent(quiet), takers)


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
    quiet.click_first(f"{TOAST} button", "e.innerText === 'Show'")
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
    before, plain = state(quiet), sent(quiet)
    assert len(_users(plain, takers)) == 2
    do(quiet, MAKE)
    faster = sent(quiet)
    assert set(_users(faster, takers).values()) == {MODEL} and len(_users(faster, takers)) == 2
    assert quiet.run(f"return {OURS}.length") == 1
    undo(quiet, before)


def _sampler_in_a_subgraph(page: Page) -> None:
    """Our first template without our nodes, the sampler alone in a subgraph."""
    page.open_shipped("text_to_image")
    do(page, REMOVE)
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
    before, plain = state(quiet), sent(quiet)
    do(quiet, MAKE)
    faster = sent(quiet)
    assert set(_users(faster, takers).values()) == {MODEL}
    assert _without(faster, MODEL) == _without(plain)
    assert quiet.run(f"return {OURS}.every((n) => n.graph !== app.rootGraph)")
    undo(quiet, before)
    do(quiet, MAKE)
    do(quiet, REMOVE)
    assert sent(quiet) == plain


@pytest.mark.parametrize("mode", [4, 2], ids=["bypassed", "muted"])
def test_a_compile_model_that_is_there_but_off_is_switched_on(quiet: Page, mode: int) -> None:
    quiet.open_shipped("text_to_image")
    plain = sent(quiet)
    quiet.run(f"{OURS}.find((n) => n.comfyClass === {MODEL!r}).mode = {mode}")
    before = state(quiet)
    assert MODEL not in {node["class_type"] for node in sent(quiet).values()}
    do(quiet, MAKE)
    assert sent(quiet) == plain
    quiet.toast("1 node switched on, in this workflow")
    undo(quiet, before)


def test_where_there_is_nothing_to_do_it_says_why(quiet: Page) -> None:
    quiet.open_shipped("text_to_image")
    before = state(quiet)
    do(quiet, MAKE)
    assert "is there already" in quiet.toast("nothing to add")
    assert state(quiet) == before
    quiet.run("app.rootGraph.clear()")
    quiet.forget_toasts()
    do(quiet, MAKE)
    quiet.toast("No sampler that takes a model was found")
    do(quiet, REMOVE)
    quiet.toast("has none of its nodes")


def test_a_server_that_does_not_answer_is_told_and_nothing_is_changed(quiet: Page) -> None:
    _open(quiet, _read(IN_SUBGRAPH))
    before = state(quiet)
    quiet.send("Network.enable")
    quiet.send("Network.setBlockedURLs", urls=["*/warmgraph/places"])
    try:
        do(quiet, MAKE)
        quiet.toast("The server does not answer.")
        assert state(quiet) == before
    finally:
        quiet.send("Network.setBlockedURLs", urls=[])
        quiet.send("Network.disable")
    quiet.errors[:] = [text for text in quiet.errors if "ERR_BLOCKED_BY_CLIENT" not in text]


def test_vaes_get_theirs_where_that_was_asked_for(
    quiet: Page, takers: dict[str, list[str]]
) -> None:
    _open(quiet, _read(IN_SUBGRAPH))
    before, plain = state(quiet), sent(quiet)
    do(quiet, MAKE_ALL)
    faster = sent(quiet)
    decodes = [n["inputs"]["vae"][0] for n in faster.values() if n["class_type"] == "VAEDecode"]
    assert decodes and {faster[key]["class_type"] for key in decodes} == {VAE}
    assert set(_users(faster, takers).values()) == {MODEL}
    assert _without(faster, MODEL, VAE) == _without(plain)
    lies_on_nothing(quiet)
    undo(quiet, before)


def test_what_else_can_be_compiled_is_asked_once_and_remembered(quiet: Page) -> None:
    """The models are there at once; who says nothing is not asked again, and gets nothing else."""
    quiet.open_shipped("controlnet")
    do(quiet, REMOVE)
    plain = sent(quiet)
    quiet.run("localStorage.removeItem('warmgraph.asked')")
    try:
        do(quiet, MAKE)
        quiet.toast("VAEs and ControlNets can be compiled, too")
        assert _kinds(sent(quiet)) == {MODEL}
        do(quiet, "Comfy.Undo")
        quiet.forget_toasts()
        do(quiet, MAKE)
        quiet.toast("1 node added")
        assert _kinds(sent(quiet)) == {MODEL}
        assert "can be compiled, too" not in str(quiet.run(f"return {TOASTS}"))
        quiet.run("localStorage.removeItem('warmgraph.asked')")
        do(quiet, MAKE)
        quiet.click_first(f"{TOAST} button", "e.innerText === 'Compile them too'")
        quiet.wait_for(f"{OURS}.length === 3")
        faster = sent(quiet)
        assert _kinds(faster) == {MODEL, VAE, CONTROL_NET}
        assert _without(faster, *_kinds(faster)) == _without(plain)
        lies_on_nothing(quiet)
        do(quiet, REMOVE)
        quiet.wait_for(f"{OURS}.length === 0")
        do(quiet, MAKE)
        quiet.wait_for(f"{OURS}.length === 3")
    finally:
        quiet.set_setting("Warmgraph.Speed.MakeFasterAll", False)


def _kinds(prompt: dict[str, Any]) -> set[str]:
    """The classes of our nodes."""
    return {_kind(prompt, key) for key in prompt if _kind(prompt, key).startswith("Warmgraph")}


def test_step_cache_comes_by_its_command_alone_where_ten_steps_are_made(quiet: Page) -> None:
    quiet.open_shipped("text_to_image")
    quiet.set_widget("KSampler", "steps", 9)
    before, plain = state(quiet), sent(quiet)
    do(quiet, ADD_STEP_CACHE)
    quiet.toast("fewer than 10 steps")
    assert state(quiet) == before
    quiet.set_widget("KSampler", "steps", 10)
    before, plain = state(quiet), sent(quiet)
    do(quiet, MAKE)
    assert sent(quiet) == plain
    do(quiet, ADD_STEP_CACHE)
    quiet.toast("costs some quality")
    cached = sent(quiet)
    (sampler,) = (n for n in cached.values() if n["class_type"] == "KSampler")
    assert _kind(cached, sampler["inputs"]["model"][0]) == STEP_CACHE
    assert _without(cached, STEP_CACHE) == _without(plain)
    lies_on_nothing(quiet)
    quiet.forget_toasts()
    do(quiet, ADD_STEP_CACHE)
    quiet.toast("Step Cache is there already")
    undo(quiet, before)


@pytest.mark.parametrize("name", ["deepcache", "img2img_hires", "vae_tiled_decode", "controlnet"])
def test_warmgraph_is_taken_out_of_a_workflow_by_one_command(quiet: Page, name: str) -> None:
    quiet.open_shipped(name)
    before, faster = state(quiet), sent(quiet)
    ours = {n["class_type"] for n in faster.values() if n["class_type"].startswith("Warmgraph")}
    do(quiet, REMOVE)
    left = sent(quiet)
    assert {key: node["inputs"] for key, node in left.items()} == _without(faster, *ours)
    assert quiet.run(f"return {OURS}.length") == 0
    undo(quiet, before)
    assert sent(quiet) == faster


def test_a_node_alone_in_its_subgraph_is_bypassed_instead(quiet: Page) -> None:
    """The host links no input of a subgraph straight to its output."""
    quiet.open_shipped("text_to_image")
    plain = sent(quiet)
    quiet.run(
        f"app.rootGraph.convertToSubgraph(new Set([{OURS}"
        f".find((n) => n.comfyClass === {MODEL!r})]))"
    )
    do(quiet, REMOVE)
    ours = {n["class_type"] for n in plain.values() if n["class_type"].startswith("Warmgraph")}
    left = {key: node["inputs"] for key, node in sent(quiet).items()}
    assert left == _without(plain, *ours)


def test_a_second_time_says_where_the_node_is_and_makes_no_step_of_undo(quiet: Page) -> None:
    _open(quiet, _read(IN_SUBGRAPH))
    do(quiet, MAKE)
    quiet.wait_for(f"{OURS}.length === 1")
    quiet.forget_toasts()
    settle(quiet)
    steps = "app.extensionManager.workflow.activeWorkflow.changeTracker.undoQueue.length"
    quiet.run("app.rootGraph.nodes[0].properties.late = true")  # the host's own, long after loading
    before = quiet.run(f"return {steps}")
    do(quiet, MAKE)
    name = quiet.run(f"return {OURS}[0].graph.name")
    told = quiet.toast("nothing to add")
    assert f"Compile Model is there already, in {name}" in told
    assert quiet.run(f"return {steps}") == before
    quiet.click_first(f"{TOAST} button", "e.innerText === 'Show'")
    quiet.wait_for(f"{OURS}[0].graph === app.canvas.graph && {OURS}[0].is_selected")
    do(quiet, REMOVE)
    quiet.wait_for(f"{OURS}.length === 0")
    before = quiet.run(f"app.rootGraph.nodes[0].properties.later = true; return {steps}")
    do(quiet, REMOVE)
    quiet.toast("has none of its nodes")
    assert quiet.run(f"return {steps}") == before
