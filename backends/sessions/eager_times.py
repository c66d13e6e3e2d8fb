"""Times of the host's own steps and measured speed-ups, by model and size, kept across restarts.

Where graphs survive a restart no eager step is timed; those of an earlier process under the same
conditions are used.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..attaching.attached import Attached
from ..device.gpu import sort_of
from ..host_api.process import host_flags
from ..runtime.gains import Figure, Gain, Size
from ..runtime.pace import Times
from ..storing.canonical_json import canonical_json, sha256_hex
from ..storing.files import write_whole

logger = logging.getLogger(__name__)

FILE_NAME = "eager_times.json"
#: Models that are remembered.
KEPT = 64
_MAX_BYTES = 4 << 20
_MAX_TEXT = 200


class _Known(NamedTuple):
    """Of one size: what an eager call takes, and the speed-up."""

    figure: Figure
    gain: Gain | None


class EagerTimes:
    """The times of the host's own steps, of each root module."""

    def __init__(self, directory: Path, machine: str) -> None:
        """Set up; nothing is read yet.

        Args:
            directory: the pack's private folder.
            machine: a name for this machine's device.
        """
        self._path = directory / FILE_NAME
        self._machine = machine
        self._lock = threading.Lock()
        self._table: dict[str, dict[Size, _Known]] | None = None
        #: A changed LoRA makes a new session of the same root.
        self._of: WeakKeyDictionary[torch.nn.Module, tuple[str, Times]] = WeakKeyDictionary()

    def of(self, attached: Attached) -> Times:
        """Return where the eager times of an object's root module are kept."""
        root = attached.root
        assert root is not None
        if root not in self._of:
            name = self._name(attached, root)
            with self._lock:
                known = self._read().get(name, {})
            gains = {size: each.gain for size, each in known.items() if each.gain is not None}
            self._of[root] = name, Times({size: each.figure for size, each in known.items()}, gains)
        return self._of[root][1]

    def keep(self, root: torch.nn.Module) -> None:
        """Remember what was measured of a root module, if it is new."""
        if root not in self._of:
            return
        name, times = self._of[root]
        gains = times.gains.all()
        newest = {size: _Known(figure, gains.get(size)) for size, figure in times.all().items()}
        with self._lock:
            table = self._read()
            if table.get(name) == newest or not newest:
                return
            table.pop(name, None)
            table[name] = newest
            while len(table) > KEPT:
                del table[next(iter(table))]
            plain = {
                key: [[size, *each.figure, *(each.gain or ())] for size, each in known.items()]
                for key, known in table.items()
            }
            try:
                write_whole(self._path, json.dumps(plain, allow_nan=False).encode())
            except OSError as error:
                logger.debug("What eager steps took was not written down: %s", error)

    def _name(self, attached: Attached, root: torch.nn.Module) -> str:
        """A name for a model and all that decides the time of its steps, except their size."""
        card = sort_of(attached.placement().device)
        elements = sum(parameter.numel() for parameter in root.parameters())
        facts = {
            "machine": f"{self._machine}/{card}" if card else self._machine,
            "torch": str(torch.__version__),
            "flags": host_flags(),
            "model": attached.name,
            "class": type(root).__qualname__,
            "elements": elements,
            "dtype": str(attached.placement().dtype),
        }
        return sha256_hex(canonical_json(facts).encode())

    def _read(self) -> dict[str, dict[Size, _Known]]:
        """The table, read from the file at first use; empty if the file is damaged."""
        if self._table is None:
            self._table = {}
            try:
                with self._path.open("rb") as file:
                    plain: Any = json.loads(file.read(_MAX_BYTES))
                self._table = {
                    str(name): dict(_entry(*each) for each in entries)
                    for name, entries in plain.items()
                }
            except (OSError, ValueError, TypeError, AttributeError, RecursionError):
                pass
        return self._table


def _entry(
    size: Any, ms: Any, noise: Any, factor: Any = 1.0, words: Any = None, more: Any = 0.0
) -> tuple[Size, _Known]:
    """Parse a size and what is known of it: a figure, and a gain where there are `words`.

    Raises:
        ValueError, TypeError: they are not valid.
    """
    for number in (ms, noise, factor, more):
        if type(number) is not float or not 0 <= number < math.inf:
            raise ValueError("it is no time and no factor")
    if not ms or not factor:
        raise ValueError("nothing takes no time")
    gain = None if words is None else Gain(factor, str(words)[:_MAX_TEXT], more)
    shapes = tuple(tuple(int(side) for side in shape) for shape in size)
    return shapes, _Known(Figure(ms, noise), gain)
