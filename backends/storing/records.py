"""Records of learned models on disk: one signed file for each structure.

A record decides which classes are imported and what a graph writes into, so one that was not signed
here is not read. Without it the model is watched for one step again.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import GraphFileError
from .canonical_json import canonical_json
from .files import open_regular, remove_stale, write_whole
from .signing import Signer

logger = logging.getLogger(__name__)

SUFFIX = ".learned"
#: Records that the private folder keeps; the one that was written last is the last to go.
KEPT = 256
_MOST_BYTES = 4 << 20
_DIGITS = frozenset("0123456789abcdef")

Record = dict[str, Any]


class Records:
    """The records of one machine, and those that lie beside workflows."""

    def __init__(self, directory: Path, signer: Signer) -> None:
        """Set up; nothing is read.

        Args:
            directory: where records are kept; made with the first one.
            signer: of this machine.
        """
        self._directory, self._signer = directory, signer
        self._lock = threading.Lock()
        self._known: dict[str, Record] = {}

    def find(self, structure: str, folders: Sequence[Path] = ()) -> Record | None:
        """Return what was learned of a structure, None where nothing is known that was signed here.

        Args:
            structure: its name, 64 hex digits.
            folders: graph folders to look in besides.

        Raises:
            ValueError: it is no such name.
        """
        name = _file_name(structure)
        with self._lock:
            if (known := self._known.get(structure)) is not None:
                return known
        beside = _file_name(structure, hidden=True)
        for path in (self._directory / name, *(folder / beside for folder in folders)):
            record = self._read(path, structure)
            if record is not None:
                with self._lock:
                    return self._known.setdefault(structure, record)
        return None

    def keep(self, structure: str, record: Record) -> None:
        """Keep what was learned of a structure, for this process in any case.

        Raises:
            ValueError: the structure's name is none.
            OSError: it cannot be written.
            GraphFileError: it cannot be signed.
        """
        name = _file_name(structure)
        with self._lock:
            self._known[structure] = record
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._write(self._directory / name, structure, record)
        self._drop_oldest()

    def carry(self, structure: str, folder: Path) -> bool:
        """Put a record that is known into a graph folder, which exists; says whether it lies there.

        Raises:
            ValueError: the structure's name is none.
            OSError: it cannot be written.
            GraphFileError: it cannot be signed.
        """
        record = self.find(structure)
        if record is None:
            return False
        path = folder / _file_name(structure, hidden=True)
        if self._read(path, structure) != record:
            self._write(path, structure, record)
        return True

    def _write(self, path: Path, structure: str, record: Record) -> None:
        remove_stale(path.parent)  # drafts of processes that were killed while they wrote
        signature = self._signer.sign(_signed_text(structure, record))
        write_whole(path, canonical_json({"record": record, "signature": signature}).encode())

    def _read(self, path: Path, structure: str) -> Record | None:
        try:
            with open_regular(path) as file:
                text = file.read(_MOST_BYTES + 1)
            if len(text) > _MOST_BYTES:
                raise ValueError(f"it is larger than {_MOST_BYTES} bytes")
            content = json.loads(text)
            record, signature = content["record"], content["signature"]
            signed = _signed_text(structure, record)
            if isinstance(record, dict) and self._signer.verify(signed, str(signature)):
                return record
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, RecursionError, GraphFileError) as why:
            logger.debug("%s is not read: %s", path, why)
            return None
        logger.info("Warmgraph: %s was not learned on this machine: it is learned anew", path)
        return None

    def _drop_oldest(self) -> None:
        """Keep no more than `KEPT` files."""
        files = []
        for entry in os.scandir(self._directory):
            if entry.name.endswith(SUFFIX):
                files.append((entry.stat().st_mtime_ns, entry.path))
        for _, path in sorted(files)[: max(0, len(files) - KEPT)]:
            Path(path).unlink(missing_ok=True)


def _signed_text(structure: str, record: Any) -> str:
    return canonical_json({"learned of": structure, "record": record})


def _file_name(structure: str, *, hidden: bool = False) -> str:
    """A record's file; beside workflows a hidden one, which the host does not list."""
    if len(structure) != 64 or not _DIGITS.issuperset(structure):
        raise ValueError(f"a structure's name must be 64 hex digits, got {structure!r}")
    return f"{'.' if hidden else ''}{structure}{SUFFIX}"
