"""A workflow with nodes of ours for people who have no Warmgraph."""

from __future__ import annotations

import json
from typing import Any

import pytest

from warmgraph_tools.page import OPEN, Page

from .faster import MAKE_ALL, OURS, do, sent, settle
from .test_make_faster import IN_SUBGRAPH, IN_THE_OPEN, TWO_MODELS, _open, _read

PLAIN = (
    "(await import('/extensions/warmgraph/js/export_without.js'))"
    ".without(app.rootGraph.serialize())"
)


@pytest.mark.parametrize("name", [IN_SUBGRAPH, TWO_MODELS, IN_THE_OPEN])
def test_an_export_without_us_opens_as_it_was_before(quiet: Page, name: str) -> None:
    _open(quiet, _read(name))
    plain = sent(quiet)
    do(quiet, MAKE_ALL)
    quiet.wait_for(f"{OURS}.length >= 2")
    settle(quiet)
    before = quiet.run("return JSON.stringify(app.rootGraph.serialize())")
    exported: dict[str, Any] = quiet.run(f"return {PLAIN}")
    assert quiet.run("return JSON.stringify(app.rootGraph.serialize())") == before
    assert exported["nodes"] and "Warmgraph" not in json.dumps(exported)
    _open(quiet, exported)
    assert sent(quiet) == plain


def test_every_node_names_its_pack_and_version_and_that_changes_no_workflow(quiet: Page) -> None:
    quiet.open_shipped("text_to_image")
    settle(quiet)
    assert quiet.run(f"return {OPEN}.isModified") is False
    do(quiet, MAKE_ALL)
    quiet.wait_for(f"{OURS}.length === 2")
    saved = quiet.run("return app.rootGraph.serialize().nodes")
    packs = [
        (node["properties"].get("cnr_id"), node["properties"].get("ver"))
        for node in saved
        if node["type"].startswith("Warmgraph")
    ]
    assert packs == [("warmgraph", "0.1.0")] * 2
