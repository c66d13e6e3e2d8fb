"""What the ways to compute one thing take on this machine, kept in a small file: each is timed once
for a class of sizes, when a call of that class first comes.

A graph holds no such choice: it serves every card and every PyTorch.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..storing.files import write_whole
from .gpu_time import by_turns

logger = logging.getLogger(__name__)

KEPT = 1024
#: The way that the host takes.
HOST = "host"

#: Milliseconds by way.
Times = Mapping[str, float]


class Timings:
    """The times of one sort of calls, by machine and class of sizes; for any thread."""

    def __init__(
        self, path: Path, machine: str, ways: frozenset[str], *, are_short: bool = False
    ) -> None:
        """Args: the file, a name for this machine's card and PyTorch, the ways besides the host's,
        and whether the processor's part of a call may be as long as the GPU's.

        What is no way of these in the file is passed over.
        """
        self._path = path
        self._machine = machine
        self._are_short = are_short
        self._lock = threading.Lock()
        self._all = _read(path, ways | {HOST})

    def of(self, size_class: str, runs: Mapping[str, Callable[[], Any]]) -> Times | None:
        """Return what each way takes; one that this GPU refuses is missing.

        Args:
            size_class: what calls of about the same times have in common.
            runs: by way, makes the call at hand; timed now where no call of this class was before.

        Returns:
            None where nothing can be timed now: a later call does it.
        """
        with self._lock:
            times = self._all.get(self._machine, {}).get(size_class)
            if times is not None:
                return times
            if torch.cuda.is_current_stream_capturing():
                return None
            try:
                times = by_turns(runs, are_short=self._are_short)
            except torch.OutOfMemoryError:
                return None
            self._keep(size_class, times)
            return times

    def _keep(self, size_class: str, times: Times) -> None:
        """Remember times; a disk that cannot be written costs their being taken once more."""
        mine = self._all.setdefault(self._machine, {})
        mine[size_class] = {name: round(time, 4) for name, time in times.items()}
        while len(mine) > KEPT:
            del mine[next(iter(mine))]
        try:
            write_whole(self._path, json.dumps(self._all, indent=1).encode())
        except OSError as error:
            logger.debug("%s was not written: %s", self._path.name, error)


def saved(times: Times, way: str) -> float:
    """Return the milliseconds that a way saves; negative where it takes longer or was refused."""
    return times.get(HOST, 0.0) - times.get(way, math.inf)


def _read(path: Path, ways: frozenset[str]) -> dict[str, dict[str, dict[str, float]]]:
    try:
        table: Any = json.loads(path.read_text("utf-8"))
        return {
            str(machine): {
                str(size_class): {name: float(times[name]) for name in times.keys() & ways}
                for size_class, times in classes.items()
                if HOST in times
            }
            for machine, classes in table.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
