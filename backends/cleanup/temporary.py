"""Temporary folders of this pack: each has its owner's name in its own, so that a later start can
tell at once what belongs to no living process.

    warmgraph-PURPOSE-PID.START.PLACE-RANDOM
"""

from __future__ import annotations

import atexit
import contextlib
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

from . import owners
from .keeper import end_processes_of

logger = logging.getLogger(__name__)

#: Age of what is in nobody's use any more, where nobody can be asked.
STALE_SECONDS = 2 * 24 * 3600.0
_OURS = re.compile(rf"warmgraph-[a-z]+-({owners.PATTERN})-[a-z0-9_]{{8}}")
_TRIES = 5


def make(purpose: str) -> Path:
    """Make a folder that only this user can read; whoever asks for it removes it.

    Args:
        purpose: a word of small letters, for people.

    Raises:
        OSError: there is no room or no temporary folder.
    """
    return Path(tempfile.mkdtemp(prefix=f"warmgraph-{purpose}-{owners.me()}-"))


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
    found = []
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
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
