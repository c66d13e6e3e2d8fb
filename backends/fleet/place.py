"""A place for files that machines share: a folder, or whatever fsspec leads to. Nothing here is
trusted, and any call may hang.

Names are relative to the place, with slashes. Object stores show a file whole or not at all by
themselves; a folder does by renaming.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from ..errors import GraphFileError
from ..reasons import of
from ..storing.files import open_regular, write_whole
from .schemes import scheme_of

_STEP_BYTES = 1 << 20
#: Of claims, which are a line.
SMALL_BYTES = 4096
#: Before a request that failed is made again, about; each differs, or a crowd would stay one.
PAUSES_S = (0.2, 0.6, 1.8)
#: What no further request changes.
_FINAL = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    NotImplementedError,
    ImportError,
    GraphFileError,
)


class TooLargeError(GraphFileError):
    """What lies there is larger than anything of ours."""

    def __init__(self) -> None:
        super().__init__(of("file_too_large"))


class Place(Protocol):
    """Where files lie. Each call raises what its library raises, and besides what is said."""

    def fetch(self, name: str, target: Path, most: int) -> None:
        """Copy a file to a new file of this machine.

        Raises:
            FileNotFoundError: there is none.
            TooLargeError: it has more bytes than `most`.
        """

    def write(self, name: str, data: bytes) -> None:
        """Write a file, in place of one of that name."""

    def create(self, name: str, data: bytes) -> None:
        """Write a file that must not be there yet; of several machines, one succeeds.

        Raises:
            FileExistsError: it is there.
        """

    def remove(self, name: str) -> None:
        """Remove a file.

        Raises:
            FileNotFoundError: there is none.
        """

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder; none where there is no such folder."""


def open_place(url: str, options: Mapping[str, Any]) -> Place:
    """Return the place that a checked URL leads to; imports what that needs."""
    return FolderPlace(_path_of(url)) if scheme_of(url) == "file" else FsspecPlace(url, options)


def small(place: Place, name: str, spool: Path) -> bytes:
    """Return what a short file holds.

    Raises:
        FileNotFoundError: there is none.
        TooLargeError: it is not short.
    """
    with private_folder(spool) as folder:
        draft = folder / "small"
        place.fetch(name, draft, SMALL_BYTES)
        return draft.read_bytes()


@contextmanager
def private_folder(spool: Path) -> Iterator[Path]:
    """A folder of its own in the private one, for as long as it is needed."""
    spool.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = tempfile.mkdtemp(dir=spool, prefix="incoming-")
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)


class FolderPlace:
    """A folder that is mounted here."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def fetch(self, name: str, target: Path, most: int) -> None:
        """See `Place`."""
        with open_regular(self._root / name) as source, open(target, "xb") as copy:
            size = 0
            while step := source.read(_STEP_BYTES):
                size += len(step)
                if size > most:
                    raise TooLargeError
                copy.write(step)

    def write(self, name: str, data: bytes) -> None:
        """See `Place`."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)

    def create(self, name: str, data: bytes) -> None:
        """See `Place`."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:
            file.write(data)

    def remove(self, name: str) -> None:
        """See `Place`."""
        (self._root / name).unlink()

    def names(self, folder: str) -> list[str]:
        """See `Place`."""
        try:
            return sorted(os.listdir(self._root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []


class FsspecPlace:
    """What fsspec leads to. A request that fails is made again a few times."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        import fsspec

        # An instance of our own: fsspec keeps others, with their credentials, for the process.
        self._fs, root = fsspec.core.url_to_fs(url, **{"skip_instance_cache": True, **options})
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def fetch(self, name: str, target: Path, most: int) -> None:
        """See `Place`."""
        _again(self._fs.get_file, self._path(name), str(target), callback=_limit(most))

    def write(self, name: str, data: bytes) -> None:
        """See `Place`."""
        _again(self._fs.pipe_file, self._path(name), data)

    def create(self, name: str, data: bytes) -> None:
        """See `Place`."""
        _again(self._fs.pipe_file, self._path(name), data, mode="create")

    def remove(self, name: str) -> None:
        """See `Place`."""
        _again(self._fs.rm_file, self._path(name))

    def names(self, folder: str) -> list[str]:
        """See `Place`."""
        self._fs.invalidate_cache()
        try:
            found = _again(self._fs.ls, self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)


def _again(request: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Make a request; where it fails for no lasting reason, make it again."""
    for pause in PAUSES_S:
        try:
            return request(*arguments, **options)
        except _FINAL:
            raise
        except Exception:  # whatever a library raises; the last one is told
            time.sleep(pause * random.uniform(0.5, 1.5))
    return request(*arguments, **options)


def _limit(most: int) -> Any:
    """What fsspec tells of each step of a copy, and what ends it when it is too much."""
    from fsspec.callbacks import Callback

    class Limit(Callback):  # type: ignore[misc]
        def call(self, hook_name: str | None = None, **kwargs: Any) -> None:
            if max(self.value, self.size or 0) > most:
                raise TooLargeError

    return Limit()


def _path_of(url: str) -> Path:
    """The folder that a file's URL names."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if os.name == "nt" and path[:1] == "/" and path[2:3] == ":":
        path = path[1:]
    return Path(f"//{parts.netloc}{path}" if parts.netloc else path)
