"""Atomic file writing, and opening only regular files.

Under Windows another program may hold a file for a moment (a virus scanner, OneDrive): it cannot be
replaced or removed then. And a path has an end there.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from ..reasons import Reason, of

_TEMPORARY = re.compile(r"\..+\.[0-9]+\.[0-9a-f]{8}\.tmp")
_STALE_S = 3600.0  # a temporary file this old has no living writer
#: Characters of the longest path that Windows opens, unless its registry has it take longer ones.
LONGEST_PATH = 259 if sys.platform == "win32" else None
#: Windows' errors for what another program has open: access denied, a sharing or lock violation.
_HELD = (5, 32, 33)
_TOO_LONG = 206  # of a folder's name; of a file's Windows says that it is not found
_TRIES, _FIRST_WAIT_S = 10, 0.01  # five seconds together
T = TypeVar("T")


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, without ever waiting for a pipe or device in its place.

    Raises:
        OSError: it cannot be opened or is not a regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = patiently(lambda: os.open(path, flags))
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
    # Its path is no longer than a graph's own, which may be as long as it can be.
    draft = path.with_name(f".{path.name.lstrip('.')[:16]}.{unique}.tmp")
    try:
        make(draft)
        patiently(lambda: os.replace(draft, path))
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def patiently(act: Callable[[], T]) -> T:
    """Return what `act` does with a file, tried again for five seconds while another program holds
    it.

    Raises:
        OSError: it is still held, or anything else is wrong, at once.
    """
    for attempt in range(_TRIES - 1):
        try:
            return act()
        except PermissionError as error:
            if not _is_held(error):
                raise
            time.sleep(_FIRST_WAIT_S * 2**attempt)
    return act()


def _is_held(error: OSError) -> bool:
    code = getattr(error, "winerror", None)
    if code is None:  # Python's `open` does not pass Windows' own code on
        return sys.platform == "win32" and isinstance(error, PermissionError)
    return code in _HELD


def why_unwritable(error: OSError, path: Path) -> tuple[Reason, Reason]:
    """Say why a file cannot be written, and what to do."""
    if _is_held(error):
        return of("held_open", error=error.strerror or error), of("do_let_go")
    length = len(os.path.abspath(path))
    not_found = (
        isinstance(error, FileNotFoundError) or getattr(error, "winerror", None) == _TOO_LONG
    )
    if not_found and LONGEST_PATH is not None and length > LONGEST_PATH:
        return of("path_too_long", count=length, most=LONGEST_PATH), of("do_shorten")
    return Reason.plain(str(error.strerror or error)), of("do_free_space")


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
