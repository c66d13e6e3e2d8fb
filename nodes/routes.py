"""The routes: what pages and commands may ask of the engine, and the few things they may tell it.

Every POST takes JSON alone, by its content type, which a form on another site cannot send; the host
itself refuses requests of other origins. None of them runs code, trusts a file or takes a path.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from ..backends.engine import Engine
from ..backends.errors import shown
from ..backends.sessions.inventory import What
from ..backends.sessions.settings import SETTINGS, Settings
from . import metrics

logger = logging.getLogger(__name__)

#: Of a request's body, in bytes.
MAX_BODY = 64 * 1024

Handler = Callable[[web.Request], Awaitable[web.Response]]


class _RefusedError(Exception):
    """A request is not served; the status and text say why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def register(table: Any, *, engine: Callable[[], Engine], settings: Callable[[], Settings]) -> None:
    """Add the routes to the host's table.

    Args:
        table: an `aiohttp.web.RouteTableDef`.
        engine, settings: give those of this server.
    """

    async def get_report(_request: web.Request) -> web.Response:
        """GET /warmgraph/report: all that Warmgraph knows, as JSON."""

        def answer() -> dict[str, Any]:
            overview = engine().overview
            return {**overview.snapshot(), **overview.details()}

        return web.json_response(await asyncio.to_thread(answer))

    async def get_settings(_request: web.Request) -> web.Response:
        """GET /warmgraph/settings: each setting's value, default and range, as JSON."""
        values = settings().as_dict()
        return web.json_response(
            {name: {**asdict(setting), "value": values[name]} for name, setting in SETTINGS.items()}
        )

    async def get_metrics(_request: web.Request) -> web.Response:
        """GET /warmgraph/metrics: figures in Prometheus' text format, where that is wanted."""
        if not settings().offers_metrics:
            return _refusal(404, "metrics are off; switch them on in Settings > Warmgraph")
        if not metrics.is_installed():
            return _refusal(404, f"metrics need the Python package {metrics.LIBRARY}")
        snapshot = await asyncio.to_thread(lambda: engine().overview.snapshot())
        body, kind = metrics.render(snapshot)
        return web.Response(body=body, headers={"Content-Type": kind})

    def change_settings(changes: Any) -> Any:
        """POST /warmgraph/settings: change some settings, answer all of them."""
        try:
            return settings().update(changes)
        except OSError as error:
            logger.warning("Settings are in force but cannot be kept: %s", error)
            reason = f"settings are in force but cannot be kept: {error.strerror}"
            raise _RefusedError(500, reason) from error

    def direct_builds(wish: Any) -> Any:
        """POST /warmgraph/builds: {"action": "pause" | "resume" | "cancel"}; answer them."""
        overview = engine().overview
        if _choice(wish, "action", ("pause", "resume", "cancel")) == "cancel":
            overview.cancel_builds()
        else:
            overview.pause_builds(wish["action"] == "pause")
        return {"building": overview.building()}

    def clear_store(wish: Any) -> Any:
        """POST /warmgraph/store: {"action": "clear", "what": "unused" | "unfit" | "all"}, answer
        how many graphs and bytes went.
        """
        _choice(wish, "action", ("clear",))
        what = What(_choice(wish, "what", [each.value for each in What]))
        removed = engine().overview.clear_store(what)
        return {"removed": removed.files, "bytes": removed.bytes}

    def free_captured(wish: Any) -> Any:
        """POST /warmgraph/captured: {"action": "free"}, answer how many bytes and whether it is
        done; else it is when the run that goes on has ended.
        """
        _choice(wish, "action", ("free",))
        held, done = engine().overview.free_captured()
        return {"bytes": held, "done": done}

    table.get("/warmgraph/report")(get_report)
    table.get("/warmgraph/settings")(get_settings)
    table.get("/warmgraph/metrics")(get_metrics)
    table.post("/warmgraph/settings")(_answering(change_settings))
    table.post("/warmgraph/builds")(_answering(direct_builds))
    table.post("/warmgraph/store")(_answering(clear_store))
    table.post("/warmgraph/captured")(_answering(free_captured))


def _answering(serve: Callable[[Any], Any]) -> Handler:
    """Make a handler that reads JSON, has it served in a thread, and answers JSON."""

    async def handle(request: web.Request) -> web.Response:
        try:
            wish = await _read_json(request)
            return web.json_response(await asyncio.to_thread(serve, wish))
        except _RefusedError as error:
            return _refusal(error.status, str(error))
        except ValueError as error:
            return _refusal(400, str(error))

    return handle


async def _read_json(request: web.Request) -> Any:
    """Return a request's JSON.

    Raises:
        _RefusedError: it is of another type, too large, or no JSON.
    """
    if request.content_type != "application/json":
        reason = f"content type must be application/json, got {request.content_type}"
        raise _RefusedError(415, reason)
    try:
        return json.loads(await _read_body(request))
    except ValueError as error:
        reason = f"body must be JSON of at most {MAX_BODY >> 10} KiB: {error}"
        raise _RefusedError(400, reason) from error
    except RecursionError as error:
        raise _RefusedError(400, "body must be JSON, got one that is nested too deeply") from error


async def _read_body(request: web.Request) -> bytes:
    """Return a request's body; one that is too large is not read any further.

    Raises:
        ValueError: it is too large.
    """
    body = bytearray()
    if (request.content_length or 0) <= MAX_BODY:
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > MAX_BODY:
                break
        else:
            return bytes(body)
    raise ValueError("it is larger")


def _choice(wish: Any, name: str, choices: tuple[str, ...] | list[str]) -> str:
    """Return one of the words that a field of a request may be.

    Raises:
        ValueError: it is none of them.
    """
    value = wish.get(name) if isinstance(wish, dict) else None
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")
    return str(value)


def _refusal(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)
