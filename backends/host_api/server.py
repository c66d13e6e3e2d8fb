"""The host's web server: the running prompt, open pages, users.

Relies on the host's `server.py` (`PromptServer`), `execution.py` (`PromptQueue`) and
`app/user_manager.py`. The server is passed in, never imported.
"""

from __future__ import annotations

from typing import Any


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
