"""A small process that outlives its server only to clear up behind it, on Linux:
`python -I -S keeper.py PID TEMP OWNER`.

When the server with this number is gone (a fork of it may hold the pipe open), the owner's folders
in TEMP are removed, after every process was killed that was started with such a folder in its
environment. A byte on the pipe sends the keeper away.

Imports only the standard library: it runs beside every build, and a program of few megabytes is not
the first to be killed when memory is short.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable

#: In the environment of a worker and of whatever it starts: the worker's cache folder.
VARIABLE = "WARMGRAPH_WORKER"
_LOOK_S = 0.5
_PATIENCE_S = 10.0


def end_processes_of(folders: Iterable[str | os.PathLike[str] | bytes]) -> None:
    """Kill every process that has one of these cache folders in its environment, and wait for its
    end, ten seconds at most. Only on Linux can that be seen.
    """
    folders = list(folders)
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        found = processes_of(folders)
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue  # it ended by itself
        time.sleep(0.01)


def processes_of(folders: Iterable[str | os.PathLike[str] | bytes]) -> list[int]:
    """Return the processes that have one of these cache folders in their environment.

    Only on Linux can that be seen.
    """
    marks = {VARIABLE.encode() + b"=" + os.fsencode(folder) for folder in folders}
    if not marks or not sys.platform.startswith("linux"):
        return []
    return [pid for pid in _numbers() if not marks.isdisjoint(_environment(pid))]


def _numbers() -> list[int]:
    try:
        names = os.listdir("/proc")
    except OSError:  # a system may hide it
        return []
    own = os.getpid()
    return [int(name) for name in names if name.isdigit() and int(name) != own]


def _environment(pid: int) -> list[bytes]:
    """What a process was started with; nothing for one of another user, or that has ended."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _main(server: int, temp: str, owner: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its server, and not before
    os.nice(19)
    while not select.select([0], [], [], _LOOK_S)[0]:
        if os.getppid() != server:
            break
    else:
        if os.read(0, 1):
            return
    folders = [os.path.join(temp, name) for name in os.listdir(temp) if f"-{owner}-" in name]
    end_processes_of(folders)
    import shutil  # megabytes that are not needed before

    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]), *sys.argv[2:4])
