"""What this machine keeps for Warmgraph: the store, the signing key, the folders beside workflows,
and what killed processes left. Checked, never changed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from warmgraph_backends.cleanup import keeper, temporary
from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.fleet.keys import signer_of
from warmgraph_backends.sessions.settings import Settings
from warmgraph_backends.storing.folders import SUFFIX, list_folders
from warmgraph_backends.storing.graph_file import RefusedFileError, key_of, read_header
from warmgraph_backends.storing.signing import KEY_FILE, Signer

from .line import Line

PRIVATE = "__warmgraph"
GIB = 2**30
#: Free space below which builds may fail for want of it.
_TIGHT_BYTES = 512 << 20
_SHOWN = 3


class _Found(NamedTuple):
    """Compiled graphs on disk: how many are signed here, and which are damaged, or signed elsewhere
    with no copy signed here.

    A server with its own key may share a store, so another's file beside ours is right.
    """

    ours: int
    foreign: list[Path]
    damaged: list[Path]


def signing_key(user: Path) -> Line:
    """The key that tells graphs made here from all others."""
    key = _key_of(user)
    if not user.is_dir():
        text = f"there is no ComfyUI user folder {user}; name it with --user-directory"
        return Line("signing key", False, text)
    if not key.exists():
        return Line("signing key", True, f"none yet; the first build makes {key}")
    if _is_open_to_others(key):
        remedy = (
            f"run `chmod 600 {key}`, or delete it if they may have read it: all is compiled again"
        )
        text = f"other accounts of this machine can read it; {remedy}"
        return Line("signing key", False, text)
    try:
        fingerprint = Signer(key.parent).fingerprint
    except GraphFileError as error:
        return Line("signing key", False, str(error))
    return Line("signing key", True, f"{key}, yours alone, fingerprint {fingerprint}")


def store(root: Path, user: Path) -> Iterator[Line]:
    """The shared store: whether it can be written, its size, free space, and whose files it has."""
    nearest = next(folder for folder in (root, *root.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        remedy = "let the user who runs ComfyUI write there, or a restart compiles all of it again"
        yield Line("store", False, f"{nearest} cannot be written; {remedy}")
        return
    paths = [path for path in _files(root) if key_of(path) and not path.name.startswith(".")]
    size = sum(path.stat().st_size for path in paths)
    cap, free = Settings(user / PRIVATE).store_cap_bytes, shutil.disk_usage(nearest).free
    used = f"{size / 2**20:.1f} MiB of at most {cap / GIB:.1f} GiB"
    text = f"{root}: {len(paths)} compiled graphs, {used}"
    if not root.exists():
        text = f"{root}: not there yet, the first compiled graph makes it"
    text += f"; {free / GIB:.1f} GiB of the disk are free"
    tight = free < _TIGHT_BYTES
    remedy = "; free some space, or lower store_cap_gib in the settings" if tight else ""
    yield Line("store", not tight, f"{text}{remedy}")
    yield from _whose("files of the store", paths, user)


def beside_workflows(user: Path) -> Iterator[Line]:
    """Whose graphs lie beside the workflows of every user of the host."""
    found = []
    for workflows in sorted(user.glob("*/workflows")):
        for name in list_folders(workflows):
            folder = workflows / f"{name}{SUFFIX}"
            found += [path for path in _files(folder) if key_of(path)]
    yield from _whose("compiled graphs beside workflows", found, user)


def leftovers(user: Path) -> Line:
    """What killed processes have left behind."""
    folders = temporary.abandoned()
    if programs := keeper.processes_of(folders):
        numbers = ", ".join(map(str, programs[:_SHOWN]))
        text = f"{len(programs)} programs of servers that have ended still run ({numbers} ...)"
        remedy = "the next build of a server ends them, or end them yourself"
        return Line("leftovers", False, f"{text}; {remedy}")
    count = len(folders)
    text = f"{count} of processes that were killed; the next server's first build removes them"
    return Line("leftovers", True, text if count else "none")


def _whose(name: str, paths: Iterable[Path], user: Path) -> Iterator[Line]:
    """Count the files that this machine's key has not signed, by their headers."""
    if _is_open_to_others(_key_of(user)):  # reading it would close it
        return
    try:
        found = _sorted_out(paths, user)
    except GraphFileError:  # the key is broken, which its own line says
        return
    if found.foreign:
        text = f"this machine did not sign {len(found.foreign)} of them, and never loads those"
        remedy = "`python cli.py trust FOLDER` if you trust where they came from"
        yield Line(name, False, f"{text}; {remedy}: {_folders_of(found.foreign)}")
    if found.damaged:
        text = f"{len(found.damaged)} of them are not whole"
        remedy = "delete them: what is missing is compiled again"
        yield Line(name, False, f"{text}, such as {found.damaged[0]}; {remedy}")
    if found.ours and not found.foreign and not found.damaged:
        yield Line(name, True, f"all {found.ours} are signed by this machine")


def _sorted_out(paths: Iterable[Path], user: Path) -> _Found:
    signer = signer_of(user / PRIVATE)
    ours: list[str | None] = []
    foreign, damaged = [], []
    for path in paths:
        try:
            header = read_header(path)
        except RefusedFileError:
            damaged.append(path)
            continue
        if header.is_signed(signer):
            ours.append(key_of(path))
        else:
            foreign.append(path)
    lacking = [path for path in foreign if key_of(path) not in ours]
    return _Found(len(ours), lacking, damaged)


def _folders_of(paths: Iterable[Path]) -> str:
    folders = sorted({str(path.parent) for path in paths})
    return ", ".join(folders[:_SHOWN]) + (" ..." if len(folders) > _SHOWN else "")


def _key_of(user: Path) -> Path:
    return user / PRIVATE / KEY_FILE


def _is_open_to_others(key: Path) -> bool:
    return os.name == "posix" and key.exists() and bool(key.stat().st_mode & 0o077)


def _files(folder: Path) -> list[Path]:
    """The files of a folder and of those within it; none where it cannot be read."""
    found = [Path(path, name) for path, _, names in os.walk(folder) for name in sorted(names)]
    return [path for path in found if path.is_file()]
