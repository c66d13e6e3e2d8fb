"""Browsers with the page of a server, closed when the file's tests are over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from warmgraph_tools.chromium import find_chromium
from warmgraph_tools.host import Server
from warmgraph_tools.page import Page, expect_no_welcome


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Server], Page]]:
    """Open browsers, each of a profile of its own, with a server's page."""
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium: install one, or set WARMGRAPH_CHROMIUM to its program")
    with ExitStack() as opened:

        def open_page(server: Server) -> Page:
            expect_no_welcome(server)
            page = Page(program, tmp_path_factory.mktemp("profile"), server)
            opened.push(page)
            page.open_server()
            return page

        yield open_page


@pytest.fixture(scope="module")
def page(browse: Callable[[Server], Page], server: Server, place_model: Callable[..., str]) -> Page:
    """A browser over the shared server, whose templates find a narrow SDXL."""
    place_model(server, "narrowxl", name="sd_xl_base_1.0.safetensors")
    return browse(server)


@pytest.fixture
def quiet(page: Page) -> Page:
    """The page, with nothing said yet and nothing open over its canvas."""
    page.run("document.querySelectorAll('.litecontextmenu').forEach((e) => e.remove())")
    page.forget_toasts()
    return page
