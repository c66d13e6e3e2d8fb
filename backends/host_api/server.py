"""The host's web server: the running prompt, open pages, users.

Relies on the host's `server.py` (`PromptServer`), `execution.py` (`PromptQueue`) and
`app/user_manager.py`. The server is passed in, never imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Ended(NamedTuple):
    """A prompt that is over.

    Attributes:
        id: the host's.
        nodes: by id, each with its class and inputs.
        extra_data: what came with it.
        outputs: the nodes whose results were wanted.
        cached: nodes whose results were there already.
        is_whole: whether it came to its end.
    """

    id: str
    nodes: dict[str, Any]
    extra_data: dict[str, Any]
    outputs: list[str]
    cached: frozenset[str]
    is_whole: bool


def ended_prompts(server: Any, count: int) -> list[Ended]:
    """Return the last prompts that the host still knows, the newest first."""
    kept = server.prompt_queue.get_history(max_items=count, map_function=_ended)
    return list(reversed(kept.values()))


def _ended(entry: dict[str, Any]) -> Ended:
    _, identity, nodes, extra_data, outputs = entry["prompt"][:5]
    status = entry["status"] or {}
    told = (data for event, data in status.get("messages", ()) if event == "execution_cached")
    cached = frozenset(node for data in told for node in data["nodes"])
    is_whole = status.get("status_str") == "success"
    return Ended(identity, nodes, extra_data, outputs, cached, is_whole)


def running_prompt(server: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the running prompt and its `extra_data`, both {} if none. Queue items are (number, id,
    prompt, extra_data, ...).
    """
    running, _ = server.prompt_queue.get_current_queue_volatile()
    return (running[0][2], running[0][3]) if running else ({}, {})


def known_users(server: Any) -> set[str]:
    """Return the users that the server knows, in multi-user mode."""
    return set(server.user_manager.users)


def has_open_pages(server: Any) -> bool:
    return bool(server.sockets)


def page_of_prompt(server: Any) -> str | None:
    """Return the page that started the running prompt, None for a program."""
    page: str | None = server.client_id
    return page
