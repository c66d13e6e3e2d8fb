"""Which of two ways to compute one thing is taken, by their times on this machine: both are timed
once for a class of sizes, when a call of that class first comes, and kept in a small file.

A graph holds no such choice: it serves every card and every PyTorch.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..kernels.gpu_time import by_turns
from ..storing.files import write_whole

logger = logging.getLogger(__name__)

KEPT = 1024
#: The way that the host takes.
HOST = "host"

#: Milliseconds by way.
Times = Mapping[str, float]


class Ways:
    """Computes one sort of thing as the host does, or in another way where that is quicker on this
    machine; for any thread.

    Attributes:
        chosen: the ways that are taken, by form.
    """

    def __init__(self, path: Path, machine: str, other: str, *, are_short: bool = False) -> None:
        """Read the file.

        What is no way of these in the file is passed over.

        Args:
            path: the file.
            machine: a name for this machine's card and PyTorch.
            other: the name of the other way.
            are_short: whether the processor's part of a call may be as long as the GPU's.
        """
        self.chosen: dict[Hashable, str] = {}
        self._path = path
        self._machine = machine
        self._other = other
        self._are_short = are_short
        self._lock = threading.Lock()
        self._all = _read(path, {HOST, other})

    def run(
        self,
        form: Hashable,
        size_class: Callable[[], str | None],
        host: Callable[[], torch.Tensor],
        other: Callable[[], torch.Tensor],
        *,
        must_save_ms: float,
    ) -> torch.Tensor:
        """Compute it; one way is taken for a form from its first call on.

        Args:
            form: what a call's way hangs on, within this process.
            size_class: says what calls of about the same times have in common; None where the
                host's way is taken unasked.
            host, other: make the call at hand.
            must_save_ms: so much must a call save by the other way.
        """
        chosen = self.chosen.get(form)
        if chosen is None:
            name = size_class()
            times: Times | None = {}
            if name is not None:
                times = self._times(name, {HOST: host, self._other: other})
            if times is None:
                return host()
            chosen = quicker(times, self._other, must_save_ms)
            if len(self.chosen) >= KEPT:
                self.chosen.clear()
            self.chosen[form] = chosen
        if chosen != HOST:
            try:
                return other()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # it takes not all sizes of a class
                logger.debug("%s refused %s: %s", chosen, form, error)
                self.chosen[form] = HOST
        return host()

    def _times(self, size_class: str, runs: Mapping[str, Callable[[], Any]]) -> Times | None:
        """What each way takes, timed now where no call of this class was before; one that this GPU
        refuses is missing. None where nothing can be timed now: a later call does it.
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


def quicker(times: Times, other: str, must_save_ms: float) -> str:
    """Choose a way; one that was refused has no time."""
    saved = times.get(HOST, 0.0) - times.get(other, math.inf)
    return other if saved >= must_save_ms else HOST


def _read(path: Path, ways: set[str]) -> dict[str, dict[str, dict[str, float]]]:
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
