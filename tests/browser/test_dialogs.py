"""Our dialogs beside the host's: theirs come first, whichever opened first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from warmgraph_tools.page import Page

OURS, THEIRS = "dialog.warmgraph-report", "[role=dialog]:not(.warmgraph-report)"
OPEN = """
(await import('/extensions/warmgraph/js/full_report.js')).showFullReport('Report', 'text')
"""
ON_TOP = f"""((dialog) => {{
  const {{ x, y, width, height }} = dialog?.getBoundingClientRect() ?? {{}};
  return dialog?.contains(document.elementFromPoint(x + width / 2, y + height / 2));
}})(document.querySelector({THEIRS!r}))"""


@pytest.fixture(autouse=True)
def _closed(page: Page) -> Iterator[None]:
    """A page without dialogs, before and after."""
    page.open_shipped("text_to_image")
    if page.run(f"return !!document.querySelector({THEIRS!r})"):  # a model that is missing
        page.escape(THEIRS)
    yield
    left = page.run("return !!document.querySelector('.warmgraph-back, #vue-app[inert]')")
    assert not left and page.own_errors() == []


def test_a_dialog_of_the_hosts_that_opens_later_lies_over_ours_and_has_the_keys(page: Page) -> None:
    page.run(OPEN)
    page.wait_for(f"!!document.activeElement.closest({OURS!r})")
    page.run("void app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    page.wait_for(ON_TOP)
    page.escape(THEIRS)
    assert page.run(f"return !!document.querySelector({OURS!r})")
    page.escape(OURS)


def test_ours_opens_below_one_that_is_there_and_leaves_it_the_focus(page: Page) -> None:
    page.run("void app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    page.wait_for(f"{ON_TOP} && !!document.activeElement.closest({THEIRS!r})")
    page.run(OPEN)
    page.wait_for(f"!!document.querySelector({OURS!r}) && {ON_TOP}")
    assert page.run(f"return !!document.activeElement.closest({THEIRS!r})")
    page.escape(THEIRS)
    page.click(f"{OURS} [data-action=close]")


def test_nothing_of_the_page_is_reached_meanwhile_and_a_click_beside_closes_it(page: Page) -> None:
    page.run(OPEN)
    places = page.run(
        "return [[5, 5], [20, 300], [1300, 60], [1500, 800]].map(([x, y]) =>"
        " document.elementFromPoint(x, y).className)"
    )
    assert places == ["warmgraph-back"] * 4
    page.mouse(20, 300)
    page.wait_for("!document.querySelector('.warmgraph-back')")
