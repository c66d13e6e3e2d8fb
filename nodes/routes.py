"""The routes: what pages and commands may read from the engine, and the few actions they may
request.

Every POST accepts only JSON, by its content type, which a form on another site cannot send; the
host itself refuses requests of other origins. None of them runs code, trusts a file or takes a
path.
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
from ..backends.sessions.lines import RefusedError, plain
from ..backends.sessions.settings import SETTINGS, Settings
from . import metrics
from .beside import put_beside
from .classes import host_classes
from .everywhere import Everywhere
from .placing import KINDS, find_places
from .plain import plain_prompt

logger = logging.getLogger(__name__)

#: Of a request's body, in bytes; and of one that holds a prompt.
MAX_BODY = 64 * 1024
MAX_PROMPT = 8 * 1024 * 1024

Handler = Callable[[web.Request], Awaitable[web.Response]]


class _StatusError(RefusedError):
    """A request is not served, independent of what it asks."""

    def __init__(self, status: int, key: str, **values: object) -> None:
        super().__init__(key, **values)
        self.status = status


def register(
    table: Any,
    *,
    engine: Callable[[], Engine],
    settings: Callable[[], Settings],
    everywhere: Callable[[], Everywhere],
) -> None:
    """Add the routes to the host's table.

    Args:
        table: an `aiohttp.web.RouteTableDef`.
        engine, settings, everywhere: return those of this server.
    """

    async def get_report(_request: web.Request) -> web.Response:
        """GET /warmgraph/report: all that Warmgraph knows, as JSON."""

        def answer() -> dict[str, Any]:
            overview = engine().overview
            return {**overview.snapshot(), **overview.details(), **everywhere().plain()}

        return web.json_response(await asyncio.to_thread(answer))

    async def get_settings(_request: web.Request) -> web.Response:
        """GET /warmgraph/settings: each setting's value, default and range, as JSON."""
        values = settings().as_dict()
        return web.json_response(
            {name: {**asdict(setting), "value": values[name]} for name, setting in SETTINGS.items()}
        )

    async def get_metrics(_request: web.Request) -> web.Response:
        """GET /warmgraph/metrics: figures in Prometheus' text format, if the setting is on."""
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
            logger.warning("Settings are in force but cannot be saved: %s", error)
            raise _StatusError(500, "refused_unkept", error=error.strerror) from error

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
        how many graphs and bytes were removed.
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

    def answer_places(wish: Any) -> Any:
        """POST /warmgraph/places: {"prompt", "kinds": "model", "vae", "control_net", "step_cache"};
        answer which inputs want a node of ours before them, and which nodes get none and why.
        """
        prompt, wanted = _table(wish, "prompt"), _field(wish, "kinds")
        kinds = [
            KINDS[_choice({"kinds": each}, "kinds", tuple(KINDS))]
            for each in (wanted if isinstance(wanted, list) else [wanted])
        ]
        return find_places(prompt, host_classes(), kinds).plain()

    def make_plain(wish: Any) -> Any:
        """POST /warmgraph/plain: {"prompt", "outputs": nodes that were run, for a comparison};
        answer the same without our nodes, and which nodes of it to run.
        """
        prompt = _table(wish, "prompt")
        plain, changed = plain_prompt(prompt)
        outputs = wish.get("outputs")
        if not isinstance(outputs, list):
            return {"prompt": plain, "changed": changed}
        both, wanted = put_beside(prompt, plain, outputs)
        return {"prompt": both, "changed": changed, "outputs": wanted}

    def compare(wish: Any) -> Any:
        """POST /warmgraph/compared: {"first", "second": ids of prompts with us and without};
        answer what their steps took, in sentences.
        """
        first, second = (_text(wish, name) for name in ("first", "second"))
        return engine().overview.compared(first, second)

    table.get("/warmgraph/report")(get_report)
    table.get("/warmgraph/settings")(get_settings)
    table.get("/warmgraph/metrics")(get_metrics)
    table.post("/warmgraph/settings")(_answering(change_settings))
    table.post("/warmgraph/builds")(_answering(direct_builds))
    table.post("/warmgraph/store")(_answering(clear_store))
    table.post("/warmgraph/captured")(_answering(free_captured))
    table.post("/warmgraph/compared")(_answering(compare))
    table.post("/warmgraph/places")(_answering(answer_places, limit=MAX_PROMPT))
    table.post("/warmgraph/plain")(_answering(make_plain, limit=MAX_PROMPT))


def _answering(serve: Callable[[Any], Any], *, limit: int = MAX_BODY) -> Handler:
    """Make a handler that reads JSON, serves it in a thread, and answers JSON."""

    async def handle(request: web.Request) -> web.Response:
        try:
            wish = await _read_json(request, limit)
            return web.json_response(await asyncio.to_thread(serve, wish))
        except RefusedError as error:
            status = error.status if isinstance(error, _StatusError) else 400
            (said,) = plain([error.line])
            return web.json_response({"error": str(error), "line": said}, status=status)

    return handle


async def _read_json(request: web.Request, limit: int) -> Any:
    """Return a request's JSON.

    Raises:
        RefusedError: it is of another type, too large, or not JSON.
    """
    if request.content_type != "application/json":
        raise _StatusError(415, "refused_type", got=request.content_type)
    body = await _read_body(request, limit)
    try:
        return json.loads(body)
    except ValueError as error:
        raise RefusedError("refused_json", error=error) from error
    except RecursionError as error:
        raise RefusedError("refused_nested") from error


async def _read_body(request: web.Request, limit: int) -> bytes:
    """Return a request's body; a too large one is not read to its end.

    Raises:
        RefusedError: it is too large.
    """
    body = bytearray()
    if (request.content_length or 0) <= limit:
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > limit:
                break
        else:
            return bytes(body)
    raise RefusedError("refused_size", limit=limit >> 10)


def _table(wish: Any, name: str) -> dict[str, Any]:
    """Return a field of a request that is a JSON object.

    Raises:
        RefusedError: it is not one.
    """
    return _of_kind(wish, name, dict, "refused_table")


def _text(wish: Any, name: str) -> str:
    """Return a field of a request that is a text.

    Raises:
        RefusedError: it is not one.
    """
    return _of_kind(wish, name, str, "refused_text")


def _of_kind(wish: Any, name: str, kind: type[Any], refused: str) -> Any:
    value = _field(wish, name)
    if not isinstance(value, kind):
        raise RefusedError(refused, name=name, got=type(value).__name__)
    return value


def _field(wish: Any, name: str) -> Any:
    """Return a field of a request, None where there is none."""
    return wish.get(name) if isinstance(wish, dict) else None


def _choice(wish: Any, name: str, choices: tuple[str, ...] | list[str]) -> str:
    """Return one of the words that a field of a request may be.

    Raises:
        RefusedError: it is not one of them.
    """
    value = _field(wish, name)
    if value not in choices:
        listed = ", ".join(choices)
        raise RefusedError("refused_choice", name=name, choices=listed, got=shown(value))
    return str(value)


def _refusal(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)
