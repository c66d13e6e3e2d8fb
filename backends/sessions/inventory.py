"""What the shared store holds, by model family, and what of it is not needed any more."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from ..compilers.registry import backend_named
from ..device.gpu import count, is_there
from ..errors import GraphFileError, RequirementError
from ..families.catalogue import family_title
from ..reasons import NOTHING, Reason, joined, of
from ..storing.graph_file import RefusedFileError, key_of
from ..storing.store import Store, StoreUsage
from ..target import keys
from ..target.target import explain_target
from .lines import told

#: How long a graph may lie there without being loaded until it counts as unused, in days.
UNUSED_DAYS = 30
_DAY_S = 24 * 60 * 60
_OTHER = "Other files"
_UNTRUSTED = of("untrusted")


class What(str, Enum):
    """What to clear: graphs that were not loaded for a while, those that do not fit this machine,
    or all.
    """

    UNUSED = "unused"
    UNFIT = "unfit"
    ALL = "all"


class _Made(NamedTuple):
    """What a file says of itself: its family and its target; or why it cannot be read."""

    family: str
    target: Mapping[str, Any]
    fault: Reason = NOTHING


class _Stored(NamedTuple):
    """One file of the store."""

    path: Path
    key: str
    bytes: int
    used: float
    made: _Made
    #: Why it cannot be used here, in words.
    unfit: Reason


class Inventory:
    """Looks through the store; each file is read once."""

    def __init__(self, store: Store, in_use: Callable[[], Collection[str]]) -> None:
        """Set up; nothing is read yet.

        Args:
            store: the store.
            in_use: which keys are loaded in this process.
        """
        self._store = store
        self._in_use = in_use
        self._made: dict[tuple[Path, int, int], _Made] = {}

    def by_family(self) -> list[dict[str, Any]]:
        """Return what the store holds, as JSON-plain data, the largest family first."""
        in_use, families = set(self._in_use()), defaultdict(list)
        for file in self._files():
            families[file.made.family].append(file)
        told = [_family(name, files, in_use) for name, files in families.items()]
        return sorted(told, key=lambda family: -family["bytes"])

    def clear(self, what: What) -> StoreUsage:
        """Remove files from the store. Loaded graphs keep working; those beside workflows stay.

        Returns:
            How many were removed, and their bytes.
        """
        files, in_use = self._files(), set(self._in_use())
        if what is What.UNUSED:
            files = [file for file in files if _is_unused(file, in_use)]
        elif what is What.UNFIT:
            files = [file for file in files if file.unfit]
        return self._store.remove({file.path for file in files})

    def _files(self) -> list[_Stored]:
        targets, known, made, files = _Targets(), self._made, {}, []
        for path, status in self._store.graphs():
            name = path, status.st_ino, status.st_size
            made[name] = said = known.get(name) or self._look(path)
            key = key_of(path)
            assert key is not None, "the store tells of graph files alone"
            unfit = said.fault or targets.explain(said.target)
            files.append(_Stored(path, key, status.st_size, status.st_mtime, said, unfit))
        self._made = made  # pages that ask at the same time read a new file twice at most
        return files

    def _look(self, path: Path) -> _Made:
        try:
            manifest = self._store.read_manifest(path)
        except GraphFileError as error:
            if isinstance(error, RefusedFileError):
                return _Made("", {}, of("file", path=path.name, what=error.what))
            return _Made("", {}, error.reason)
        assert manifest is not None, "every kind was wanted"
        fault = NOTHING if manifest.signer == self._store.fingerprint else _UNTRUSTED
        return _Made(str(manifest.structure["family"]), manifest.target, fault)


class _Targets:
    """What this machine compiles for, asked once for each device and backend."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], list[Mapping[str, Any]]] = {}

    def explain(self, made_for: Mapping[str, Any]) -> Reason:
        """Say why a file that was made for a target does not fit here; empty if it does."""
        device, backend = str(made_for.get("device")), str(made_for.get("backend"))
        if (device, backend) not in self._known:
            self._known[device, backend] = targets_here(device, backend)
        differing = [explain_target(made_for, ours) for ours in self._known[device, backend]]
        if not differing:
            return of("made_for_device", device=device)
        return joined(differing[0]) if all(differing) else NOTHING


def targets_here(device: str, backend: str) -> list[Mapping[str, Any]]:
    """The target of each sort of card that this machine has."""
    if not is_there(device):
        return []
    found: list[Mapping[str, Any]] = []
    try:
        for card in range(count(device)):
            target = keys.target(device, backend_named(backend), card)
            found += [] if target in found else [target]
    except RequirementError:
        return []
    return found


def _is_unused(file: _Stored, in_use: Collection[str]) -> bool:
    return file.key not in in_use and time.time() - file.used > UNUSED_DAYS * _DAY_S


def _family(name: str, files: list[_Stored], in_use: Collection[str]) -> dict[str, Any]:
    unused = [file for file in files if _is_unused(file, in_use)]
    unfit: Counter[Reason] = Counter()
    for file in files:
        if file.unfit:
            unfit[file.unfit] += file.bytes
    return {
        "family": name,
        "title": family_title(name) or name or _OTHER,
        "files": len(files),
        "bytes": sum(file.bytes for file in files),
        "last_used": round(max(file.used for file in files)),
        "in_use": sum(file.key in in_use for file in files),
        "unused_files": len(unused),
        "unused_bytes": sum(file.bytes for file in unused),
        "unfit": [
            {**told(why), "files": sum(file.unfit == why for file in files), "bytes": size}
            for why, size in unfit.most_common()
        ],
    }
