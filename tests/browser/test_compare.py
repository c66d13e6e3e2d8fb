"""Compare: the last run once more without us, both images side by side, in a real Chromium.

The tests are one story over one server and come in their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from warmgraph_tools.host import Server
from warmgraph_tools.page import TAB_BUTTON, Page

MODEL = "sd_xl_base_1.0.safetensors"
BUTTON = ".warmgraph-tab [data-action=compare]"
DIALOG = "dialog.warmgraph-report"
#: What the badges of our node say.
BADGES = (
    "app.rootGraph.nodes.find((n) => n.comfyClass === 'WarmgraphCompileModel').badges"
    ".map((badge) => (typeof badge === 'function' ? badge() : badge).text)"
)


@pytest.fixture(autouse=True)
def _no_errors(page: Page) -> Iterator[None]:
    yield
    assert page.own_errors() == []


def _own_models(server: Server) -> list[dict[str, Any]]:
    """The reports of models that the template's node attached."""
    models = server.report()["models"]
    return [m for m in models if [each["node"] for each in m["nodes"]] == ["2"]]


def _compare(page: Page) -> None:
    page.run("void app.extensionManager.command.execute('Warmgraph.Compare')")


def _pictures(server: Server, folder: str) -> list[Path]:
    """What a server has saved there, the newest last."""
    return sorted((server.base / folder).rglob("*.png"), key=lambda file: file.stat().st_mtime)


def _open_small(page: Page, *, seed: int) -> None:
    page.open_shipped("text_to_image")
    page.set_widget("KSampler", "steps", 6)  # fewer than four say nothing of a step's time
    page.set_widget("KSampler", "seed", seed)
    page.set_widget("KSampler", "control_after_generate", "fixed")
    for side in ("width", "height"):
        page.set_widget("EmptyLatentImage", side, 128)


def test_before_a_run_there_is_nothing_to_compare(page: Page) -> None:
    _open_small(page, seed=5)
    _compare(page)
    page.toast("Nothing to compare yet")
    assert page.run(f"return document.querySelector({DIALOG!r})") is None


def test_both_images_are_shown_with_their_times_and_their_difference(
    page: Page, server: Server
) -> None:
    page.run_workflow()
    server.wait_until_built()
    for seed in (6, 7):  # in the first one graphs are compared, on a busy machine in most steps
        page.set_widget("KSampler", "seed", seed)
        page.run_workflow()
    saved, shown = _pictures(server, "output"), _pictures(server, "temp")
    page.click(TAB_BUTTON)
    page.click(BUTTON)
    page.wait_for(f"!!document.querySelector({DIALOG!r})")
    text = page.run(f"return document.querySelector({DIALOG!r}).innerText")
    sides = page.run(
        f"return [...document.querySelectorAll('{DIALOG} img')].map((e) => [e.src, e.naturalWidth])"
    )
    assert [width for _, width in sides] == [128, 128]
    (model,) = _own_models(server)
    (speed,) = (each["text"] for each in model["said"])
    assert f"SDXL, 128x128: {speed}" in text and model["factor_size"] == "128x128"
    assert re.search(r"took .+ with Warmgraph, .+ without", text), text
    assert "With Warmgraph" in text and "Without Warmgraph" in text

    assert _pictures(server, "output") == saved  # previewed, not saved
    (new,) = set(_pictures(server, "temp")) - set(shown)
    one, other = (np.asarray(Image.open(each)).astype(int) for each in (saved[-1], new))
    largest = int(np.abs(one - other).max())
    said = f"Largest difference of a pixel: {largest} of 255" if largest else "are identical"
    assert said in text and largest < 8
    assert page.run("return document.activeElement.dataset.action") == "close"
    page.press("Escape")
    page.wait_for(f"!document.querySelector({DIALOG!r})")
    badge = {"faster": "{}x", "same": "about as fast", "slower": "⚠ {}x"}[model["stage"]]
    page.wait_for(f"{BADGES}.includes({badge.format(model['times'])!r})")
    for shown in (".warmgraph-tab article", ".warmgraph-status"):
        page.wait_for(f"document.querySelector('{shown}').innerText.includes({speed!r})")


def test_a_comparison_leaves_the_page_and_the_model_as_they_were(
    page: Page, server: Server
) -> None:
    page.wait_for("document.querySelectorAll('.warmgraph-tab article').length === 1")
    page.wait_for(
        "/ a step[^]*38 of 38/.test(document.querySelector('.warmgraph-status')?.innerText)"
    )
    saver = "app.rootGraph.nodes.find((n) => n.comfyClass === 'SaveImage')"
    assert page.run(f"return {saver}.images[0].type") == "output"
    (before,) = _own_models(server)
    page.set_widget("KSampler", "seed", 7)
    page.run_workflow()
    (after,) = _own_models(server)
    assert after["id"] == before["id"] and after["misses"] == []  # attached once, and never anew
    assert after["calls"]["compiled"] > before["calls"]["compiled"]


def test_a_run_that_is_cancelled_is_told(page: Page) -> None:
    page.set_widget("KSampler", "steps", 200)  # a busy browser hears late of the second one
    page.set_widget("KSampler", "seed", 8)
    page.run_workflow()
    page.run(  # told as of any other run; the page cancels it, or it might have ended until then
        "app.api.addEventListener('progress', ({ detail }) => {"
        " if (detail.value < 2 || window.isCancelled) return;"
        " window.isCancelled = true; void app.api.interrupt(); })"
    )
    _compare(page)
    page.wait_for("window.isCancelled")
    page.toast("was cancelled")
    assert page.run(f"return document.querySelector({DIALOG!r})") is None


def test_the_menu_of_our_nodes_offers_it(page: Page) -> None:
    offered = page.run(
        "return app.rootGraph.nodes.map((n) => [n.comfyClass ?? '', app.collectNodeMenuItems(n)"
        ".some((item) => /Compare/.test(item?.content))])"
    )
    assert {kind for kind, has in offered if has} == {
        kind for kind, _ in offered if kind.startswith("Warmgraph")
    }
