"""What the host's web server knows: the prompt that runs, the pages that are open, its users.

Relies on the host's `server.py` (`PromptServer`), `execution.py` (`PromptQueue`) and
`app/user_manager.py`. The server is handed in: nothing here imports it.
"""

from __future__ import annotations

from typing import Any


def running_prompt(server: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the prompt that runs now and its `extra_data`, both {} while none does.

    An item of the queue is (number, id, prompt, extra_data, ...).
    """
    running, _ = server.prompt_queue.get_current_queue_volatile()
    return (running[0][2], running[0][3]) if running else ({}, {})


def known_users(server: Any) -> set[str]:
    """Return the names of the users that the server knows, in multi-user mode."""
    return set(server.user_manager.users)


def has_open_pages(server: Any) -> bool:
    """Tell whether a page would get what is sent to all."""
    return bool(server.sockets)


def page_of_prompt(server: Any) -> str | None:
    """Return the page that started the prompt that runs now, None where a program did."""
    page: str | None = server.client_id
    return page
