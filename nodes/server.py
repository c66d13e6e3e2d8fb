"""The server's side of the pack: one engine for the process, its routes and its one event."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import folder_paths
from server import PromptServer

from ..backends.debugging import VARIABLE, Debugging, read_debugging
from ..backends.device.gpu import compiled_for
from ..backends.engine import Engine, Hooks, Paths
from ..backends.host_api.execution import check_cancelled
from ..backends.host_api.server import has_open_pages, page_of_prompt
from ..backends.sessions.lines import Line, plain
from ..backends.sessions.settings import Settings
from ..backends.sessions.warnings import of_machine
from ..backends.storing.folders import list_folders
from ..backends.target.own_code import own_fingerprint
from . import help_pages, routes
from .attachers import attached_by, page_place
from .classes import host_classes
from .everywhere import Everywhere
from .workflow import (
    current_workflow,
    take_workflow_entry,
    workflow_of,
    workflows_root,
)

logger = logging.getLogger(__name__)

EVENT = "warmgraph.report"
EVENTS_PER_SECOND = 2
STORE_FOLDER = "compiled_graphs"
PRIVATE_USER = "warmgraph"
FOLDER_LIST_SECONDS = 1.0

_engine_lock = threading.Lock()


class ReportEvent:
    """Tell every open page that a report changed; a burst of changes becomes one message.

    `changed` may be called from any thread, as often as it likes; it only starts a timer.
    """

    def __init__(self, send: Callable[[], None], *, per_second: float = EVENTS_PER_SECOND) -> None:
        self._send = send
        self._interval = 1 / per_second
        self._lock = threading.Lock()
        self._pending = False
        self._sent = 0.0

    def changed(self) -> None:
        """Send soon, and the last change for certain."""
        with self._lock:
            if self._pending:
                return
            self._pending = True
            wait = max(0.0, self._sent + self._interval - time.monotonic())
        timer = threading.Timer(wait, self._fire)
        timer.name = "warmgraph-report"
        timer.daemon = True
        timer.start()

    def _fire(self) -> None:
        with self._lock:
            self._pending = False
            self._sent = time.monotonic()
        try:
            self._send()
        except Exception:  # the timer's thread ends here
            logger.exception("Open pages were not told of a change")


def register() -> None:
    """Register the store's folder, the routes and the prompt handler; called once, at load."""
    folder_paths.add_model_folder_path(
        STORE_FOLDER, str(Path(folder_paths.models_dir, STORE_FOLDER))
    )
    instance = getattr(PromptServer, "instance", None)
    if instance is None:  # the nodes are imported without a server
        return
    get_everywhere()  # before several threads ask for it
    help_pages.register(instance.routes)
    routes.register(
        instance.routes, engine=get_engine, settings=get_settings, everywhere=get_everywhere
    )
    if callable(add := getattr(instance, "add_on_prompt_handler", None)):  # else features are off
        add(_prompt_posted)
    threading.Thread(target=_look_ahead, name="warmgraph-preflight", daemon=True).start()
    get_debugging()  # unknown words are logged when the server starts


def _look_ahead() -> None:
    """Log what this machine lacks, and read what keys depend on, before a model waits for it."""
    try:
        for warning in of_machine():
            how = f" ({warning.command})" if warning.command else ""
            logger.warning("%s: %s%s", warning.title, warning.text, how)
        own_fingerprint(compiled_for())
    except Exception:  # the thread ends here
        logger.exception("This machine could not be looked at")


@cache
def get_settings() -> Settings:
    """Return the settings of this server."""
    return Settings(_private_directory())


@cache
def get_debugging() -> Debugging:
    """Return a developer's switches of this server; the environment is read once."""
    return read_debugging(os.environ.get(VARIABLE, ""), _private_directory())


def get_engine() -> Engine:
    """Return the engine of this process; the first call makes it."""
    with _engine_lock:
        return _make_engine()


@cache
def _make_engine() -> Engine:
    engine = Engine(
        paths=Paths(
            store=Path(folder_paths.get_folder_paths(STORE_FOLDER)[0]),
            private=_private_directory(),
            workflows=workflows_root,
        ),
        settings=get_settings(),
        debugging=get_debugging(),
        hooks=Hooks(
            current_workflow=current_workflow,
            on_change=_report_event().changed,
            check_cancelled=check_cancelled,
            attached_by=attached_by,
        ),
    )
    atexit.register(engine.close)
    return engine


@cache
def get_everywhere() -> Everywhere:
    """Return what puts the setting's nodes into this server's prompts."""
    return Everywhere(
        settings=get_settings, classes=host_classes, on_change=_report_event().changed
    )


@cache
def _report_event() -> ReportEvent:
    return ReportEvent(_send_report)


def graph_folders() -> list[str]:
    """Return the graph folders to choose from; read at most once a second.

    The host reads a node's schema many times a prompt.
    """
    return _list_graph_folders(int(time.monotonic() / FOLDER_LIST_SECONDS))


def report_payload() -> dict[str, Any]:
    """Return all that the pages show."""
    return {**get_engine().overview.snapshot(), **get_everywhere().plain()}


def send_node_line(line: Line, node_id: str | None) -> None:
    """Show a line on a node of the page that started the running prompt, if a page did."""
    instance = getattr(PromptServer, "instance", None)
    page = None if instance is None else page_of_prompt(instance)
    if page is not None and node_id is not None:
        shown = {"node": page_place(node_id), "text": line.text, "lines": plain([line])}
        instance.send_sync(EVENT, shown, page)


def _prompt_posted(json_data: dict[str, Any]) -> dict[str, Any]:
    """Handle every posted prompt, on the server's loop: take our entry out, put the setting's nodes
    in, tell the engine.
    """
    json_data = get_everywhere().take(take_workflow_entry(json_data))
    workflow = workflow_of(json_data.get("extra_data"))
    if workflow is not None and _make_engine.cache_info().currsize:
        get_engine().prompt_posted(workflow)
    return json_data


def _private_directory() -> Path:
    return Path(folder_paths.get_system_user_directory(PRIVATE_USER))


def _send_report() -> None:
    instance = getattr(PromptServer, "instance", None)
    if instance is None or not has_open_pages(instance):
        return
    payload = report_payload()
    json.dumps(payload, allow_nan=False)  # the host's sender dies of a message that is not JSON
    instance.send_sync(EVENT, payload)


@lru_cache(maxsize=1)
def _list_graph_folders(second: int) -> list[str]:
    root = workflows_root(None)
    return [] if root is None else list_folders(root)
