"""Atomic file writing, and opening only regular files."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_TEMPORARY = re.compile(r"\..+\.[0-9]+\.[0-9a-f]{8}\.tmp")
_STALE_S = 3600.0  # a temporary file this old has no living writer
_TRIES = 6  # on Windows a file that another process has open cannot be replaced for a moment


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, without ever waiting for a pipe or device in its place.

    Raises:
        OSError: it cannot be opened or is not a regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(None, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that every reader sees the old file or the new one, never a part.

    The temporary file lies in the same folder under a dot name; it is gone afterwards, also after
    a failure. The folder is not made.

    Raises:
        OSError: the folder is missing or read-only, or the disk is full; an old file is untouched.
    """

    def write(draft: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(draft, flags, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    put_in_place(path, write)


def put_in_place(path: Path, make: Callable[[Path], None]) -> None:
    """Let `make` create a temporary file beside `path`, then give it that name in one step.

    Raises:
        OSError: from `make` or from the renaming.
    """
    unique = f"{os.getpid()}.{secrets.token_hex(4)}"
    draft = path.with_name(f".{path.name.lstrip('.')}.{unique}.tmp")
    try:
        make(draft)
        for attempt in range(_TRIES):
            try:
                os.replace(draft, path)
                return
            except PermissionError:
                if os.name != "nt" or attempt == _TRIES - 1:
                    raise
                time.sleep(0.01 * 2**attempt)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def remove_stale(folder: Path) -> None:
    """Delete the temporary files in `folder` whose writer must have died."""
    oldest = time.time() - _STALE_S
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _TEMPORARY.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.path)


def identity(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes when a file is replaced or written to, None without one."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def same_file(first: Path, second: Path) -> bool:
    """Tell whether two names lead to one existing file."""
    with contextlib.suppress(OSError):
        return os.path.samefile(first, second)
    return False
