"""Where files lie that machines share: a folder, or whatever fsspec leads to. Nothing there is
trusted, and any call may hang.

Names are relative to the place, with slashes. Each call raises what its library raises, once that
has repeated its request as it does. Object stores show a file whole or not at all by themselves; a
folder does by renaming.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ..errors import GraphFileError
from ..reasons import of
from ..storing.files import open_regular, write_whole
from .schemes import scheme_of

_STEP_BYTES = 1 << 20


class TooLargeError(GraphFileError):
    """The file is larger than any compiled graph can be."""

    def __init__(self) -> None:
        super().__init__(of("file_too_large"))


@contextmanager
def private_folder(spool: Path) -> Iterator[Path]:
    """A folder of its own in the private one, for as long as it is needed."""
    spool.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = tempfile.mkdtemp(dir=spool, prefix="incoming-")
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)


class StorePlace:
    """What fsspec leads to."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """Import the client that a checked URL needs, and connect."""
        import fsspec

        # An instance of our own: fsspec keeps others, with their credentials, for the process.
        self._fs, root = fsspec.core.url_to_fs(url, **{"skip_instance_cache": True, **options})
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def fetch(self, name: str, target: Path, most: int) -> None:
        """Copy a file to a new file of this machine.

        Raises:
            FileNotFoundError: there is none.
            TooLargeError: it has more bytes than `most`.
        """
        self._fs.get_file(self._path(name), str(target), callback=_limit(most))

    def write(self, name: str, data: bytes) -> None:
        """Write a file, in place of one of that name."""
        self._fs.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> None:
        """Write a file that must not be there yet; of several machines, one succeeds.

        Raises:
            FileExistsError: it is there.
        """
        self._fs.pipe_file(self._path(name), data, mode="create")

    def remove(self, name: str) -> None:
        """Remove a file.

        Raises:
            FileNotFoundError: there is none.
        """
        self._fs.rm_file(self._path(name))

    def names(self, folder: str) -> list[str]:
        """Return the names of what is in a folder; none where there is no such folder."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)


class FolderPlace(StorePlace):
    """A folder that is mounted here."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        path = unquote(parts.path)
        if os.name == "nt" and path[:1] == "/" and path[2:3] == ":":
            path = path[1:]
        self._folder = Path(f"//{parts.netloc}{path}" if parts.netloc else path)

    def _made(self, name: str) -> Path:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def fetch(self, name: str, target: Path, most: int) -> None:
        """See `StorePlace`."""
        with open_regular(self._folder / name) as source, open(target, "xb") as copy:
            while step := source.read(_STEP_BYTES):
                copy.write(step)
                if copy.tell() > most:
                    raise TooLargeError

    def write(self, name: str, data: bytes) -> None:
        """See `StorePlace`."""
        write_whole(self._made(name), data)

    def create(self, name: str, data: bytes) -> None:
        """See `StorePlace`."""
        with open(self._made(name), "xb") as file:
            file.write(data)

    def remove(self, name: str) -> None:
        """See `StorePlace`."""
        (self._folder / name).unlink()

    def names(self, folder: str) -> list[str]:
        """See `StorePlace`."""
        try:
            return sorted(os.listdir(self._folder / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []


def open_place(url: str, options: Mapping[str, Any]) -> StorePlace:
    """Return the place that a checked URL leads to."""
    return FolderPlace(url) if scheme_of(url) == "file" else StorePlace(url, options)


def _limit(most: int) -> Any:
    """What fsspec tells of each step of a copy, and what ends it when it is too much."""
    from fsspec.callbacks import Callback

    class Limit(Callback):  # type: ignore[misc]
        def call(self, hook_name: str | None = None, **kwargs: Any) -> None:
            if max(self.value, self.size or 0) > most:
                raise TooLargeError

    return Limit()
