"""A template of the host's becomes faster in three actions, and every surface tells one figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from warmgraph_tools.host import Server
from warmgraph_tools.page import TAB_BUTTON, Page

from .faster import OURS
from .test_compare import BADGES, BUTTON, DIALOG
from .test_make_faster import _open, _read

#: All in it is as its author made it, but for the work that a narrow model does here.
TEMPLATE, MODEL = "default", "v1-5-pruned-emaonly-fp16.safetensors"
WORK = {"EmptyLatentImage": {0: 128, 1: 128}, "KSampler": {2: 12}}


@pytest.fixture
def own(page: Page, server: Server, place_model: Callable[..., str]) -> Page:
    place_model(server, "narrow15", name=MODEL)
    page.open_server()
    return page


def _workflow() -> dict[str, Any]:
    workflow = _read(TEMPLATE)
    for node in workflow["nodes"]:
        for place, value in WORK.get(node["type"], {}).items():
            node["widgets_values"][place] = value
    return workflow


def test_three_actions_and_one_figure_on_node_tab_badge_and_compare(
    own: Page, server: Server
) -> None:
    _open(own, _workflow())
    own.run("document.activeElement?.blur()")
    for kind in ("rawKeyDown", "keyUp"):
        own.send(
            "Input.dispatchKeyEvent",
            type=kind, key="w", code="KeyW", windowsVirtualKeyCode=87, modifiers=1,
        )  # fmt: skip
    own.wait_for(f"{OURS}.length === 1")
    own.run_workflow()
    server.wait_until_built()
    own.run_workflow()
    own.click(TAB_BUTTON)
    own.click(BUTTON)
    own.wait_for(f"!!document.querySelector({DIALOG!r})", seconds=600)
    workflow = own.run("return app.rootGraph.id")
    (model,) = (
        each
        for each in server.report()["models"]
        if [node["workflow"] for node in each["nodes"]] == [workflow]
        and not each["nodes"][0]["node"].endswith("-plain")
    )
    (said,) = (each["text"] for each in model["said"])
    told = own.run(f"return document.querySelector({DIALOG!r}).innerText")
    assert f"{model['model']}, 128x128: {said}" in told
    own.press("Escape")
    own.wait_for(f"!document.querySelector({DIALOG!r})")
    badge = {"faster": "{}x", "same": "about as fast", "slower": "⚠ {}x"}[model["stage"]]
    own.wait_for(f"{BADGES}.includes({badge.format(model['times'])!r})")
    for place in (".warmgraph-tab article", ".warmgraph-status"):
        own.wait_for(f"document.querySelector('{place}').innerText.includes({said!r})")
    if model["stage"] != "same":  # else nothing says a factor
        assert f"{model['times']}x" in said
