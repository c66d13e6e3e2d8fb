"""Show progress on the running node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import comfy.utils
from comfy.model_management import InterruptProcessingException

from ..backends.sessions.lines import Line
from . import server


@contextmanager
def node_progress(node_id: str | None) -> Iterator[Callable[[int, int, Line], None]]:
    """Return a callback that shows progress as the host's bar and a line of text on a node.

    The callback raises the host's InterruptProcessingException when the user pressed Cancel. The
    host's own progress text is not used: the node grows by it, which modifies the workflow.
    """
    bar: comfy.utils.ProgressBar | None = None
    shown: Line | None = None

    def show(done: int, total: int, now: Line) -> None:
        nonlocal bar, shown
        if bar is None:
            bar = comfy.utils.ProgressBar(total)
        bar.update_absolute(done, total)
        if now != shown:
            shown = now
            server.send_node_line(now, node_id)

    try:
        yield show
    except InterruptProcessingException:
        server.send_node_line(server.get_engine().overview.cancelled(), node_id)
        raise
