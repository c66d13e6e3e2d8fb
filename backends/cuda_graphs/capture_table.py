"""What is known of calls that are captured as CUDA graphs when they repeat: whole calls of a root
module (`replays`), and calls of its places (`pieces`).

A call whose key came before is captured, and replayed from then on. A key that came once may never
repeat, and its first call includes one-time work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ..host_api.execution import is_interrupt, passes
from ..reasons import Reason, of
from . import driver
from .captured_call import why_not
from .memory import CapturedMemory
from .signatures import CaptureError

logger = logging.getLogger(__name__)

#: Calls of one key that run by themselves before it is captured.
CLEAN_CALLS = 2
#: Steps that a run must have left, the one that is captured among them, for a call that came once.
STEPS_LEFT = 4
#: The driver gives a graph its memory outside of what the host can make room for.
MIN_FREE_BYTES = 2**30

T = TypeVar("T")


@dataclass
class KnownCall:
    """What is known of one key.

    Attributes:
        clean: how many calls of it may have been captured, and were made.
        refused: why it is not captured.
        graph: what is captured.
        used: when it came last, as the number of that call.
    """

    clean: int = 0
    refused: Reason | None = None
    graph: Any = None
    used: int = 0

    def make_way(self) -> None:
        """Another graph needed the room of this one."""
        raise NotImplementedError


K = TypeVar("K", bound=KnownCall)


class CaptureTable(Generic[K]):
    """The captured calls of one root module, as the owner of their graphs (`memory.GraphOwner`)."""

    def __init__(self, memory: CapturedMemory, make: Callable[[], K], most: int) -> None:
        """Set up; nothing is captured yet.

        Args:
            memory: the memory that all captured graphs share.
            make: returns what is known of a key that never came.
            most: how many keys are remembered; those that came last.
        """
        self._memory = memory
        self._make = make
        self._most = most
        self._table: dict[Hashable, K] = {}
        self._calls = 0
        self._steps_begun = 0
        #: Steps that the run has left; 0: not known.
        self._left = 0
        self.captures = 0
        self.replayed = 0

    def begin_run(self) -> None:
        """Try again in a new run what had no room in the last one."""
        self._steps_begun = 0
        for known in self._table.values():
            if known.refused is not None and known.refused.retry:
                known.refused = None

    def _begin_step(self, steps: int | None) -> None:
        """A call of the root module begins, in a run of so many steps; None: not known."""
        self._left = 0 if steps is None else steps - self._steps_begun
        self._steps_begun += 1

    def _find(self, key: Hashable) -> K:
        """Return what is known of a key that came now."""
        table, self._calls = self._table, self._calls + 1
        known = table.get(key)
        if known is None:
            if len(table) >= self._most:
                self._drop(table.pop(min(table, key=lambda each: table[each].used)).graph)
            known = table[key] = self._make()
        known.used = self._calls
        return known

    def _is_due(self, known: K, *, early: bool) -> bool:
        """Whether to capture a key now.

        Args:
            early: whether one call before is enough, if the run has enough steps left.
        """
        needed = 1 if early and self._left >= STEPS_LEFT else CLEAN_CALLS
        return known.refused is None and known.clean >= needed

    # --- a graph ----------------------------------------------------------------------------------

    def _failed(self, known: K, error: Exception) -> None:
        """Note why a key could not be captured.

        Raises:
            The error, if it is not a capture's.
        """
        if is_interrupt(error) or passes(error):
            raise error
        known.refused = why_not(error)
        logger.warning("Not captured as a CUDA graph: %s", known.refused)

    def _keep(self, known: K, graph: Any, size: int) -> None:
        """Have a proved graph replayed from now on, if there is room for it.

        Args:
            size: bytes by which the shared memory has grown.
        """
        worse, known.graph = known.graph, graph
        self.captures += 1
        known.refused = self._memory.on(graph.device).add(graph, self, size)
        self._drop(worse)  # only now, because its card has another one

    def _computed(self, device: torch.device, run: Callable[[], T]) -> T:
        """What a graph gives.

        Raises:
            CaptureError: there is no memory for it; all graphs were dropped.
        """
        try:
            return run()
        except RuntimeError as error:  # the driver gives a graph its memory when it runs
            if passes(error) or "out of memory" not in str(error):
                raise
            self._memory.drop_all(device)
            raise CaptureError(of("no_memory")) from error

    def _count(self, graph: Any) -> None:
        """Note that a graph has computed a call."""
        self._memory.on(graph.device).note_use(graph)
        self.replayed += 1

    # --- memory -----------------------------------------------------------------------------------

    def forget(self, graph: Any, *, crowded: bool) -> None:
        """A graph's memory was freed: its key is captured again when it repeats, or only later if
        another graph needed the room.
        """
        for known in self._table.values():
            if known.graph is graph:
                known.graph = None
                if crowded:
                    known.make_way()

    def _drop(self, graph: Any) -> None:
        if graph is not None:
            self._memory.on(graph.device).drop(graph)

    def drop(self) -> None:
        """Free all memory and forget every key."""
        for known in list(self._table.values()):
            self._drop(known.graph)
        self._table.clear()

    @property
    def captured(self) -> int:
        """How many keys have a graph now."""
        return sum(known.graph is not None for known in list(self._table.values()))

    @property
    def vram_bytes(self) -> int:
        """VRAM that all captured graphs of the process hold; most of it is shared."""
        return self._memory.used_bytes


def missing_bytes(device: torch.device) -> int:
    """Return how much memory a card lacks for a capture; what PyTorch caches counts as taken."""
    return MIN_FREE_BYTES - driver.free_bytes(device)
