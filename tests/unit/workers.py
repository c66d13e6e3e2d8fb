"""A builder's workers as a test sees them from outside: their process ids."""

from __future__ import annotations

from warmgraph_backends.building.builder import Builder


def worker_pids(builder: Builder) -> list[int]:
    """Return the process ids of the workers that live now."""
    with builder._news:
        threads = list(builder._threads)
    processes = [thread._process for thread in threads]
    return [process.pid for process in processes if process is not None]
