"""Which graphs were already compared with eager on this machine, kept across restarts."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from .files import write_whole

logger = logging.getLogger(__name__)

FILE_NAME = "verified.json"
KEPT = 4096


class Comparisons:
    """Remembers for (graph key, payload hash, machine) how large the calls were that equalled
    eager, by weight class.

    In each process a graph is compared once with each model, whatever is remembered: the host's
    code may have changed since, and weights differ.
    """

    def __init__(self, directory: Path, machine: str) -> None:
        """Read what was kept.

        Args:
            directory: the pack's private folder.
            machine: a name for this machine's device.
        """
        self._path = directory / FILE_NAME
        self._machine = machine
        self._lock = threading.Lock()
        self._table = self._read()
        #: By model, in this process.
        self._compared: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
        #: Comparisons since this process started, but for those of written forms that told nothing.
        self.count = 0

    def most(self, key: str, payload_sha256: str, weight_class: str, model: Any) -> int:
        """Return the elements of the largest call in which this file equalled eager with this class
        of weights here; 0 if none did, or none of this model.
        """
        name = self._name(key, payload_sha256)
        with self._lock:
            if name not in self._compared.get(model, ()):
                return 0
            return self._table.get(name, {}).get(weight_class, 0)

    def add(
        self, key: str, payload_sha256: str, weight_class: str, elements: int, model: Any
    ) -> None:
        """Remember a good comparison; if the disk cannot be written, it is made once more."""
        name = self._name(key, payload_sha256)
        with self._lock:
            self.count += 1
            self._compared.setdefault(model, set()).add(name)
            classes = self._table.pop(name, {})
            known = classes.get(weight_class, 0)
            self._table[name] = {**classes, weight_class: max(known, elements)}
            while len(self._table) > KEPT:
                del self._table[next(iter(self._table))]
            text = json.dumps(self._table) if elements > known else None
        if text is None:
            return
        try:
            write_whole(self._path, text.encode())
        except OSError as error:
            logger.debug("The list of verified graphs was not written: %s", error)

    def _name(self, key: str, payload_sha256: str) -> str:
        return f"{key}/{payload_sha256[:16]}/{self._machine}"

    def _read(self) -> dict[str, dict[str, int]]:
        try:
            table: Any = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(table, dict):
            return {}
        return {
            name: {c: n for c, n in classes.items() if type(n) is int and n > 0}
            for name, classes in table.items()
            if isinstance(classes, dict)
        }
