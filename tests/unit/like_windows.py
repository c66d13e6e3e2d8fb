"""Windows' rules on Linux, in this process, for as long as a test runs.

    a file that a process of the test has open cannot be replaced, renamed or removed
    nor can a library that is loaded
    a path of 260 characters is not found, but for those that begin with `\\\\?\\`
    no SIGKILL, no fork, no groups of processes
    `sys.platform` is Windows' for the modules that a test names

What a standard stream does there, `CP1252` has a child process do. Wine shows more, but for the
260 characters (`python dev windows`).
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

LONGEST = 259
_LONGEST_FOLDER = 247
_PREFIX = "\\\\?\\"
#: Variables under which a child's standard streams are those of Windows in Western Europe.
CP1252 = {"PYTHONIOENCODING": "cp1252:strict", "PYTHONUTF8": "0"}
ACCESS_DENIED, SHARING_VIOLATION, TOO_LONG = 5, 32, 206


def refusal(code: int, path: object) -> OSError:
    """Windows' error of this number."""
    if code in (ACCESS_DENIED, SHARING_VIOLATION):
        error: OSError = PermissionError(errno.EACCES, "Sharing violation", str(path))
    else:
        error = FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
    error.winerror = code  # type: ignore[attr-defined]
    return error


class LikeWindows:
    """The rules in force; `monkeypatch` ends them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        #: Called when a held file is in the way, before that is refused.
        self.refused: Callable[[str], None] = lambda _path: None
        for name in ("stat", "lstat", "open", "listdir"):
            self._wrap(os, name, self._short)
        scandir = os.scandir
        monkeypatch.setattr(
            os,
            "scandir",
            lambda path=".": _Entries(scandir(*self._short(path)), str(path)),
        )
        for name in ("mkdir", "rmdir"):
            self._wrap(os, name, self._short_folder)
        for name in ("replace", "rename", "link"):
            self._wrap(os, name, self._free_pair if name != "link" else self._short_pair)
        for name in ("unlink", "remove"):
            self._wrap(os, name, self._free)
        for owner in (io, builtins):
            self._wrap(owner, "open", self._short)
        monkeypatch.setattr(shutil, "_use_fd_functions", False)  # Windows has none
        handle = property(lambda own: own.pid)
        monkeypatch.setattr(subprocess.Popen, "_handle", handle, raising=False)
        monkeypatch.setattr(subprocess.Popen, "kill", lambda own: os.kill(own.pid, 9))
        for module, names in {
            signal: ("SIGKILL",),
            os: ("fork", "killpg", "getpgid", "setsid", "geteuid"),
        }.items():
            for name in names:
                monkeypatch.delattr(module, name)

    def platform_of(self, *modules: ModuleType) -> None:
        """Have modules take this system for Windows."""
        for name in ("BELOW_NORMAL_PRIORITY_CLASS", "CREATE_NO_WINDOW"):
            self._patch.setattr(subprocess, name, 0, raising=False)
        for module in modules:
            self._patch.setattr(module, "sys", _Windows())

    def _wrap(self, owner: Any, name: str, rule: Callable[..., tuple[Any, ...]]) -> None:
        real = getattr(owner, name)

        def ruled(*given: Any, **named: Any) -> Any:
            return real(*rule(*given), **named)

        self._patch.setattr(owner, name, ruled)

    def _short(self, path: Any = ".", *more: Any, limit: int = LONGEST) -> tuple[Any, ...]:
        if not isinstance(path, (str, Path)):  # a descriptor, or bytes
            return (path, *more)
        text = str(path)
        if text.startswith(_PREFIX):
            return (text.removeprefix(_PREFIX), *more)
        if len(os.path.abspath(text)) > limit:
            raise refusal(3 if limit == LONGEST else TOO_LONG, text)
        return (path, *more)

    def _short_folder(self, path: Any, *more: Any) -> tuple[Any, ...]:
        return self._short(path, *more, limit=_LONGEST_FOLDER)

    def _short_pair(self, first: Any, second: Any, *more: Any) -> tuple[Any, ...]:
        return (*self._short(first), *self._short(second), *more)

    def _free(self, path: Any, *more: Any) -> tuple[Any, ...]:
        (short,) = self._short(path)
        self._must_be_free(short)
        return (short, *more)

    def _free_pair(self, first: Any, second: Any, *more: Any) -> tuple[Any, ...]:
        return (*self._free(first), *self._free(second), *more)

    def _must_be_free(self, path: Any) -> None:
        real = os.path.realpath(path)
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            held, loaded = _open_files(process.pid), _mapped_files(process.pid)
            if real in held or real in loaded:
                self.refused(real)
                raise refusal(SHARING_VIOLATION if real in held else ACCESS_DENIED, path)


class Job:
    """In place of a job object, which only Windows has: kills what is in it."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.is_over = False

    def add(self, process: int) -> None:
        """Take a process in, by what `like_windows` gives as its handle."""
        self.held.append(process)

    def end(self) -> None:
        """End them all, with what they started."""
        if self.is_over:
            return
        self.is_over = True
        for pid in self.held:
            with contextlib.suppress(psutil.Error, OSError):
                for each in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
                    os.kill(each.pid, 9)


class _Entries:
    """What a folder holds, by paths that begin as the folder's does."""

    def __init__(self, entries: Any, folder: str) -> None:
        self._entries, self._folder = entries, folder

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_error: object) -> None:
        self._entries.close()

    def __iter__(self) -> Iterator[Any]:
        return (_Entry(each, os.path.join(self._folder, each.name)) for each in self._entries)


class _Entry:
    def __init__(self, entry: os.DirEntry[str], path: str) -> None:
        self._entry, self.path = entry, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __fspath__(self) -> str:
        return self.path


class _Windows:
    """`sys`, of another platform."""

    platform = "win32"

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def _open_files(pid: int) -> set[str]:
    """What a process has open. Of a folder, the paths of what is open below it count, too."""
    found: set[str] = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found.add(os.readlink(entry))
            except OSError:
                continue  # closed meanwhile
    except OSError:
        return found
    return found | {str(parent) for path in found for parent in Path(path).parents}


def _mapped_files(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text("utf-8", "replace").splitlines()
    except OSError:
        return set()
    return {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
