"""Chooses among several ways to compute one thing, by their times on this machine: all are timed
once for a class of sizes, at its first call, and the times are kept in a small file.

A graph contains no such choice: it serves every card and every PyTorch.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..device.gpu import sort_of
from ..kernels.gpu_time import by_turns
from ..storing.files import write_whole

logger = logging.getLogger(__name__)

KEPT = 1024
#: The way that the host takes.
HOST = "host"

#: Milliseconds by way.
Times = Mapping[str, float]
Result = TypeVar("Result")
#: What makes the call at hand, by way.
Runs = Mapping[str, Callable[[], Result]]


class Autotuner:
    """Computes one sort of thing as the host does, or in another way if that is faster on this
    machine; for any thread.

    Attributes:
        chosen: the chosen way, by form.
    """

    def __init__(
        self, path: Path, machine: str, others: Collection[str], *, are_short: bool = False
    ) -> None:
        """Read the file.

        Unknown ways in the file are skipped.

        Args:
            path: the file.
            machine: a name for this machine's card and PyTorch.
            others: the names of the other ways.
            are_short: whether the processor's part of a call may be as long as the GPU's.
        """
        self.chosen: dict[Hashable, str] = {}
        self._path = path
        self._machine = machine
        self._are_short = are_short
        self._lock = threading.Lock()
        #: Held while something is timed on a card.
        self._timing: dict[torch.device | None, threading.Lock] = {}
        self._all = _read(path, {HOST, *others})

    def run(
        self,
        form: Hashable,
        size_class: Callable[[], str | None],
        runs: Runs[Result],
        *,
        must_save_ms: Times,
        device: torch.device | None = None,
    ) -> Result:
        """Compute it; the way of a form is fixed from its first call on.

        Args:
            form: what a call's way depends on, within this process: also on the available ways, and
                on the card.
            size_class: a name for calls of about the same times, including their ways, unless these
                are always the same; None: the host's way without timing.
            runs: the host's way and others. A class that was timed is not timed again.
            must_save_ms: how much a call must save by each other way.
            device: of the computation; None: the machine's first card.
        """
        chosen = self.chosen.get(form)
        if chosen is None:
            name = size_class()
            times = {} if name is None else self._times(name, runs, device)
            if times is None:
                return runs[HOST]()
            chosen = quickest(times, runs.keys(), must_save_ms)
            if len(self.chosen) >= KEPT:
                self.chosen.clear()
            self.chosen[form] = chosen
        if chosen != HOST:
            try:
                return runs[chosen]()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # it does not take all sizes of a class
                logger.debug("%s refused %s: %s", chosen, form, error)
                self.chosen[form] = HOST
        return runs[HOST]()

    def _times(self, size_class: str, runs: Runs[Any], device: torch.device | None) -> Times | None:
        """The time of each way, measured now for a new class; a way that this GPU refuses is
        missing. None if nothing can be timed now: a later call does it.
        """
        other = "" if device is None else sort_of(device)
        machine = f"{self._machine}/{other}" if other else self._machine
        with self._timing.setdefault(device, threading.Lock()):
            times = self._all.get(machine, {}).get(size_class)
            if times is not None:
                return times
            if torch.cuda.is_current_stream_capturing():
                return None
            try:
                times = by_turns(runs, are_short=self._are_short)
            except torch.OutOfMemoryError:
                return None
        self._keep(machine, size_class, times)
        return times

    def _keep(self, machine: str, size_class: str, times: Times) -> None:
        """Remember times; if the disk cannot be written, they are measured again."""
        with self._lock:
            mine = self._all.setdefault(machine, {})
            mine[size_class] = {name: round(time, 4) for name, time in times.items()}
            while len(mine) > KEPT:
                del mine[next(iter(mine))]
            text = json.dumps(self._all, indent=1)
        try:
            write_whole(self._path, text.encode())
        except OSError as error:
            logger.debug("%s was not written: %s", self._path.name, error)


def quickest(times: Times, ways: Collection[str], must_save_ms: Times) -> str:
    """Choose one of these ways: another than the host's if that saves enough. A refused one has no
    time.
    """
    costs = {way: times[way] + must_save_ms.get(way, 0.0) for way in ways if way in times}
    best = min(costs, key=costs.__getitem__, default=HOST)
    return best if costs.get(best, 0.0) <= costs.get(HOST, 0.0) else HOST


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
