"""The nodes' help, in every language that a page may ask for, English by default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from aiohttp import web

_PACK = Path(__file__).absolute().parents[1]  # by the name that the host knows, also through a link
_DOCS = _PACK / "web" / "docs"


def register(table: Any) -> None:
    """Answer where the host's page first looks for a node's help, as otherwise it logs an error.

    Args:
        table: an `aiohttp.web.RouteTableDef`; the host adds its files after these routes.
    """

    pack = re.sub("[{}]", "", _PACK.name)  # what a route would read as a variable

    @table.get(f"/extensions/{pack}/docs/{{node:[0-9A-Za-z]+}}/{{language:[0-9A-Za-z-]+}}.md")
    async def get_help(request: web.Request) -> web.FileResponse:
        node, language = (request.match_info[name] for name in ("node", "language"))
        for page in (_DOCS / node / f"{language}.md", _DOCS / f"{node}.md"):
            if page.is_file():
                return web.FileResponse(page)
        raise web.HTTPNotFound
