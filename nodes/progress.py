"""Show progress on the node that runs."""

from __future__ import annotations

from collections.abc import Callable

import comfy.utils
from server import PromptServer


def node_progress(node_id: str | None) -> Callable[[int, int, str], None]:
    """Return a callback that shows progress as the host's bar and a line of text on a node.

    The callback raises the host's InterruptProcessingException when the user pressed Cancel.
    """
    bar: comfy.utils.ProgressBar | None = None

    def show(done: int, total: int, text: str) -> None:
        nonlocal bar
        if bar is None:
            bar = comfy.utils.ProgressBar(total)
        bar.update_absolute(done, total)
        send_node_text(text, node_id)

    return show


def send_node_text(text: str, node_id: str | None) -> None:
    """Show a line of text on a node of the page that started this prompt, if a page did."""
    instance = getattr(PromptServer, "instance", None)
    if instance is not None and instance.client_id is not None and node_id is not None:
        instance.send_progress_text(text, node_id, sid=instance.client_id)
