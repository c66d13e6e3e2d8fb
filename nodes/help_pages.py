"""The nodes' help, in every language that a page may ask for: English where there is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from aiohttp import web

_PACK = Path(__file__).absolute().parents[1]  # by the name that the host knows, a link's too
_DOCS = _PACK / "web" / "docs"


def register(table: Any) -> None:
    """Answer where the host's page looks for a node's help first, or it logs an error.

    Args:
        table: an `aiohttp.web.RouteTableDef`; the host puts its files behind what is in it.
    """

    pack = re.sub("[{}]", "", _PACK.name)  # what a route takes for a variable

    @table.get(f"/extensions/{pack}/docs/{{node:[0-9A-Za-z]+}}/{{language:[0-9A-Za-z-]+}}.md")
    async def get_help(request: web.Request) -> web.FileResponse:
        node, language = (request.match_info[name] for name in ("node", "language"))
        for page in (_DOCS / node / f"{language}.md", _DOCS / f"{node}.md"):
            if page.is_file():
                return web.FileResponse(page)
        raise web.HTTPNotFound
