"""A builder's workers as a test sees them from outside: their ids, and whether they live."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from warmgraph_backends.building.builder import Builder


def worker_pids(builder: Builder) -> list[int]:
    """Return the process ids of the workers that live now."""
    with builder._news:
        threads = list(builder._threads)
    processes = [thread._process for thread in threads]
    return [process.pid for process in processes if process is not None]


def lives(pid: int) -> bool:
    """Tell whether a process lives; one that only waits to be reaped does not."""
    if sys.platform == "win32":  # where `os.kill` ends whatever it is asked about
        return psutil.pid_exists(pid)
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until(condition: Callable[[], bool]) -> bool:
    """Wait up to a minute for a condition; returns whether it came true."""
    until = time.monotonic() + 60.0
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
