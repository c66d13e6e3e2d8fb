"""Temporary folders of this pack: each has its owner's name in its own, so that a later start can
tell at once what belongs to no living process.

    warmgraph-PURPOSE-PID.START.PLACE-RANDOM

NVIDIA's driver takes a kernel's path in ASCII only, under Windows. So they lie in a folder with
such a path, whatever the user is called.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import owners
from .keeper import end_processes_of

logger = logging.getLogger(__name__)

#: Age of what is in nobody's use any more, where nobody can be asked.
STALE_SECONDS = 2 * 24 * 3600.0
_OURS = re.compile(rf"warmgraph-[a-z]+-({owners.PATTERN})-[a-z0-9_]{{8}}")
_TRIES = 5
_LONGEST_NAME = 1024


def make(purpose: str) -> Path:
    """Make a folder that only this user can read; whoever asks for it removes it.

    Args:
        purpose: a word of small letters, for people.

    Raises:
        OSError: there is no room or no temporary folder.
    """
    prefix = f"warmgraph-{purpose}-{owners.me()}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_parents()[0]))


def make_for_life(purpose: str) -> Path:
    """Make a folder that goes when this process ends, not when a fork of it does.

    Raises:
        OSError: there is no room or no temporary folder.
    """
    folder, maker = make(purpose), os.getpid()

    def clear_up() -> None:
        if os.getpid() == maker:
            _clear(folder)

    atexit.register(clear_up)
    return folder


@contextmanager
def made(purpose: str) -> Iterator[Path]:
    """Have a folder for as long as the context lasts.

    Raises:
        OSError: there is no room or no temporary folder.
    """
    folder = make(purpose)
    try:
        yield folder
    finally:
        _clear(folder)


def remove(folder: Path) -> None:
    """Remove a folder; one that is in use stays, and a later start removes it."""
    # On Windows a file stays while a compiler that the worker started still runs.
    for _ in range(_TRIES):
        _clear(folder)
        if not folder.exists():
            return
        time.sleep(0.2)
    logger.info("Left %s behind: still in use, removed at a later start", folder)


def _clear(folder: Path) -> None:
    """Remove what can be removed; under Windows also what Triton writes beyond the longest path
    that a program may name there without this prefix.
    """
    path = os.path.abspath(folder)
    is_long = sys.platform == "win32" and not path.startswith("\\\\")
    shutil.rmtree(f"\\\\?\\{path}" if is_long else path, ignore_errors=True)


def _parents() -> list[str]:
    """Where our folders are, that of new ones first: the system's folder of temporary files, by its
    short name or that for all users' programs where its own is not ASCII.
    """
    system = tempfile.gettempdir()
    if sys.platform == "win32":
        if not system.isascii():
            others = (_short_name(system), os.environ.get("PROGRAMDATA"))
            return [*(path for path in others if path and path.isascii()), system]
    return [system]


def _short_name(path: str) -> str | None:
    """Windows' other name of a folder, as PEOPLE~1; None where the disk keeps none."""
    system: Any = ctypes
    text = ctypes.create_unicode_buffer(_LONGEST_NAME)
    length = system.WinDLL("kernel32").GetShortPathNameW(path, text, _LONGEST_NAME)
    return text.value if 0 < length < _LONGEST_NAME else None


def owner_of(name: str) -> owners.Owner | None:
    """Return whose folder this is by its name; None for a name that we did not make."""
    ours = _OURS.fullmatch(name)
    return owners.parse(ours[1]) if ours else None


def sweep() -> None:
    """Remove the folders of processes that have ended, and what is two days old where nobody can
    tell; nothing of another user, and nothing through a link. What still runs for such a folder
    is ended before.
    """
    folders = abandoned()
    end_processes_of(folders)
    for folder in folders:
        _clear(folder)
    if folders:
        logger.info("Removed %d temporary folders of processes that were killed", len(folders))


def _is_abandoned(owner: owners.Owner, changed: float) -> bool:
    """Whether nobody uses something of this owner any more, that was changed then."""
    life = owners.life(owner)
    if life is owners.Life.UNKNOWN:
        return changed < time.time() - STALE_SECONDS
    return life is owners.Life.ENDED


def abandoned() -> list[Path]:
    """Return this user's folders whose processes have ended: what `sweep` removes."""
    return [folder for parent in _parents() for folder in _abandoned_in(parent)]


def _abandoned_in(parent: str) -> list[Path]:
    found = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            owner = owner_of(entry.name)
            if owner is None:
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if (
                    stat.S_ISDIR(status.st_mode)
                    and _is_mine(status)
                    and _is_abandoned(owner, status.st_mtime)
                ):
                    found.append(Path(entry.path))
    return found


def _is_mine(status: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
