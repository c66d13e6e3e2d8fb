"""Which graphs were already compared with eager on this machine, kept across restarts."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

from ..files import write_whole

logger = logging.getLogger(__name__)

FILE_NAME = "verified.json"
KEPT = 4096


class Verified:
    """Remembers (graph key, payload hash, machine) -> weight classes that equalled eager."""

    def __init__(self, directory: Path, machine: str) -> None:
        """Args: the pack's private folder, and a name for this machine's device."""
        self._path = directory / FILE_NAME
        self._machine = machine
        self._lock = threading.Lock()
        self._table = self._read()
        #: Comparisons that were good since this process started.
        self.count = 0

    def has(self, key: str, payload_sha256: str, weight_class: str) -> bool:
        """Tell whether this very file equalled eager with this class of weights here."""
        with self._lock:
            return weight_class in self._table.get(self._name(key, payload_sha256), ())

    def add(self, key: str, payload_sha256: str, weight_class: str) -> None:
        """Remember a good comparison; a disk that cannot be written costs one more comparison."""
        name = self._name(key, payload_sha256)
        with self._lock:
            self.count += 1
            classes = self._table.pop(name, [])
            self._table[name] = sorted({*classes, weight_class})
            while len(self._table) > KEPT:
                del self._table[next(iter(self._table))]
            text = json.dumps(self._table)
        try:
            write_whole(self._path, text.encode())
        except OSError as error:
            logger.debug("The list of verified graphs was not written: %s", error)

    def _name(self, key: str, payload_sha256: str) -> str:
        return f"{key}/{payload_sha256[:16]}/{self._machine}"

    def _read(self) -> dict[str, list[str]]:
        try:
            table: Any = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(table, dict):
            return {}
        return {k: v for k, v in table.items() if isinstance(v, list)}
