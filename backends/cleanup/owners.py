"""Owners of files on a shared disk: processes, told apart from all later ones.

A process's number is reused after it has ended, so its start is part of its name. On another
machine, after a reboot or in another container numbers mean other processes, so the place is, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import sys
from enum import Enum
from functools import cache
from pathlib import Path
from typing import NamedTuple

#: How an owner is written: number, start and place, for names of files and what is in them.
PATTERN = r"[0-9]{1,10}\.[0-9]{1,20}\.[0-9a-f]{8}"


class Life(str, Enum):
    """What is known of an owner."""

    ALIVE = "alive"
    ENDED = "ended"
    #: It runs elsewhere, or this system does not tell.
    UNKNOWN = "unknown"


class Owner(NamedTuple):
    """A process; its text fits into a file's name.

    Attributes:
        pid: its number.
        start: when it started, in the system's own unit; 0 where that is not known.
        place: where its number means anything, as 8 hex digits.
    """

    pid: int
    start: int
    place: str

    def __str__(self) -> str:
        return f"{self.pid}.{self.start}.{self.place}"


def me() -> Owner:
    """Return this process, also in a fork of another."""
    pid = os.getpid()
    return Owner(pid, _own_start(pid), here())


def parse(text: str) -> Owner | None:
    """Read an owner's text; None for any other."""
    if not text.isascii() or not re.fullmatch(PATTERN, text) or text.endswith("\n"):
        return None
    pid, start, place = text.split(".")
    return Owner(int(pid), int(start), place)


def life(owner: Owner) -> Life:
    """Say whether a process still runs; a killed one that nobody has reaped does not."""
    if owner.place != here() or not owner.start or not _own_start(os.getpid()):
        return Life.UNKNOWN
    return Life.ALIVE if start_of(owner.pid) == owner.start else Life.ENDED


def start_of(pid: int) -> int | None:
    """Return when a process started, in a unit that only compares; None if none of that number
    runs, or this system does not tell.
    """
    if not sys.platform.startswith("linux"):
        return _ask_psutil(pid)
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


@cache
def here() -> str:
    """Return 8 hex digits for this machine, since it was booted, and this container of it."""
    facts = [platform.node()]
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):
            facts.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip())
        with contextlib.suppress(OSError):
            facts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]


@cache
def _own_start(pid: int) -> int:
    return start_of(pid) or 0


def _ask_psutil(pid: int) -> int | None:
    try:
        import psutil  # comes with the host, but workers and tools may be without
    except ImportError:
        return None
    try:
        process = psutil.Process(pid)
        ended = process.status() == psutil.STATUS_ZOMBIE
        return None if ended else int(process.create_time() * 1000)
    except psutil.Error:
        return None
