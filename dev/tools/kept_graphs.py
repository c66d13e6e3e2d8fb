"""Compiled graphs that tests keep from one run to the next, found by what is in them.

A graph's key has all that it hangs on, Warmgraph's own code among it, so an old one is not found.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

#: Names a folder that keeps compiled graphs for later runs (`dev test` does); a run without it
#: builds them anew.
VARIABLE = "WARMGRAPH_TEST_GRAPHS"
#: For so long graphs are kept.
_DAYS = 14

#: In a base folder: its store, and what only its owner may read.
STORE = Path("models", "compiled_graphs")
KEY = Path("user", "__warmgraph", "signing.key")


def pass_on(source: Path, target: Path, keys: Sequence[str] | None = None) -> None:
    """Copy what a base folder's store has, and the key that signed it, to another; nothing where
    there is none, or that one signs with a key of its own.

    Args:
        keys: of the graphs; None for all.
    """
    if not (source / KEY).is_file():
        return
    for folder in (target / STORE, (target / KEY).parent):
        folder.mkdir(parents=True, exist_ok=True)
    if not (target / KEY).is_file():
        shutil.copy2(source / KEY, target / KEY)
    if (source / KEY).read_bytes() != (target / KEY).read_bytes():
        return
    names = ["*"] if keys is None else keys
    files = [file for name in names for file in (source / STORE).glob(f"{name}.safetensors")]
    for file in files:
        found = target / STORE / file.name
        if not found.exists():
            shutil.copy2(file, found.with_suffix(".copy"))
            found.with_suffix(".copy").replace(found)


@contextmanager
def keeping(root: Path) -> Iterator[None]:
    """Give a base folder the graphs that earlier runs built in folders of its name, and keep for
    later ones what this run builds in it. Whatever else they wrote there stays behind.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        yield
        return
    kept = Path(named) / root.name
    kept.mkdir(parents=True, exist_ok=True)
    from filelock import FileLock  # torch needs it, too

    lock = FileLock(kept / "lock")
    with lock:
        pass_on(kept, root)
    yield
    with lock:
        pass_on(root, kept)


def folder() -> Path:
    """Return where a user's programs keep what can be made again."""
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "warmgraph" / "tests"


def prune(kept: Path) -> None:
    """Remove graphs that were built long ago."""
    before = time.time() - _DAYS * 24 * 60 * 60
    for file in kept.glob(f"*/{STORE.as_posix()}/*.safetensors"):
        if file.stat().st_mtime < before:
            file.unlink(missing_ok=True)
