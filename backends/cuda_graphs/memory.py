"""The VRAM of captured CUDA graphs: for each card a pool, a budget, and a place in the host's list
of models.

The host frees memory of its loaded models; so this memory is listed there as one, and freed when
the host asks for it.

A captured call holds two sorts of memory. Its inputs and outputs are its own and are freed with it;
so is what libraries hold for its own stream, which serves the next such call. Its temporary memory
is in the pool, where calls overlay one another, so one call's share is unknown. PyTorch's allocator
frees a pool with the last graph that was captured into it; the driver (`cudaMallocAsync`) frees all
of it when asked, and each remaining graph takes its part again when it is replayed.
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#graph-memory-nodes

From 2.12 on PyTorch frees cuBLAS's workspaces of a stream with any graph that was captured on it,
while other graphs of that stream still write there. All captures of a card share a stream. So a
dropped graph is *retired*: kept until none of its card is replayed any more.
Source: `CUDAGraph::reset` in aten/src/ATen/cuda/CUDAGraph.cpp of torch 2.12-2.15;
https://github.com/pytorch/pytorch/issues/193402
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..host_api.memory import LoadedEntry, empty_cache
from ..reasons import Reason, of
from .capture_gate import CAPTURE_GATE
from .driver import trim

#: Retired graphs of one card, beyond which all that is captured there goes, to be captured anew.
MOST_RETIRED = 128


def has_to_keep() -> bool:
    """Tell whether this PyTorch frees what a stream's graphs share with any of them."""
    return bool(torch.__version__ >= "2.12.dev0")


class Held(Protocol):
    """What holds memory: a `CapturedCall`, or a `Piece`.

    Attributes:
        device: on which.
        own_bytes: memory that is free once this is dropped, whatever else is left.
    """

    device: torch.device

    @property
    def own_bytes(self) -> int: ...

    def free(self) -> list[Any]:
        """Give it back, once the device has finished with it; returns its CUDA graphs, for PyTorch
        to free.
        """


class GraphOwner(Protocol):
    """Whoever replays a graph; notified when it is dropped."""

    def forget(self, graph: Any, *, crowded: bool) -> None:
        """The graph's memory was freed; `crowded`: to make room for another graph."""


class CardMemory:
    """The captured graphs of one device; for any thread."""

    def __init__(
        self,
        device: torch.device,
        budget_bytes: Callable[[torch.device], int],
        release: Callable[[torch.device], None],
    ) -> None:
        """Set up; nothing is captured yet. Arguments are those of `CapturedMemory`."""
        self._device = device
        self._budget_bytes = budget_bytes
        self._release = release
        self._lock = threading.RLock()
        #: The one that was used last is the last.
        self._owners: dict[Held, weakref.ref[GraphOwner]] = {}
        self._own: dict[Held, int] = {}
        self._retired: list[Any] = []
        self._shared = 0
        self._pool: Any = None
        self._entry: LoadedEntry | None = None

    @property
    def used_bytes(self) -> int:
        """Memory that the captured graphs hold together; temporary memory is shared."""
        return self._shared + sum(list(self._own.values()))  # a page asks while a prompt goes on

    def sweep(self) -> None:
        """Drop what nobody replays any more, because its model is gone."""
        for graph, owner in list(self._owners.items()):
            if owner() is None:
                self.drop(graph)

    def pool(self) -> Any:
        """Return the pool to capture into."""
        self.sweep()
        if len(self._retired) >= MOST_RETIRED:
            self.drop_all()
        if not self._owners or self._pool is None:  # an emptied pool must not be used again
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def add(self, graph: Held, owner: GraphOwner, size: int) -> Reason | None:
        """Count a new graph, for which the pool grew by `size` bytes.

        Over the budget the graphs that were not used for longest are dropped, one by one, as long
        as their own memory makes enough room. If the pool itself is too large, all are dropped,
        since only then it is free: those still wanted are captured again. A graph that is too large
        alone is not kept.

        Returns:
            Why the graph cannot be kept at all, or None.
        """
        budget = self._budget_bytes(self._device)
        with self._lock:
            alone = not self._owners
            self._owners[graph] = weakref.ref(owner)
            self._own[graph] = graph.own_bytes
            self._shared += max(size, 0)
            needed = self.used_bytes
            fits = self._shared + self._own[graph] <= budget
            while fits and self.used_bytes > budget:
                self.drop(next(iter(self._owners)), crowded=True)
        if fits:
            if self._entry is None:
                self._entry = LoadedEntry(self._device, lambda: self.used_bytes, self.drop_all)
            self._entry.list()  # among the host's loaded models, while there is something to free
            return None
        self.drop_all()
        if not alone:
            return None
        return of("over_budget", needed=needed >> 20, budget=budget >> 20)

    def note_use(self, graph: Held) -> None:
        """Note that a graph was replayed: all others go before it."""
        with self._lock:
            if (owner := self._owners.pop(graph, None)) is not None:
                self._owners[graph] = owner

    def drop(self, graph: Held, *, crowded: bool = False) -> None:
        """Drop one graph, added or not; its part of the pool serves the others, and the pool is
        freed after the last one.
        """
        with self._lock:
            reference = self._owners.pop(graph, None)
            self._own.pop(graph, None)
            self._retired += graph.free()
            if not has_to_keep():
                self._reset_retired()
            if reference is not None and (owner := reference()) is not None:
                owner.forget(graph, crowded=crowded)
            self._let_go()

    def _let_go(self) -> None:
        if not self._owners:
            self._shared = 0
            self._reset_retired()
            self._release(self._device)

    def _reset_retired(self) -> None:
        while self._retired:
            self._retired.pop(0).reset()

    def drop_all(self) -> int:
        """Free everything; returns how many bytes that was."""
        with self._lock:
            freed = self.used_bytes
            if not self._owners:  # what failed may be there
                self._let_go()
            for graph in list(self._owners):
                self.drop(graph)
        if freed:
            with CAPTURE_GATE.loud():
                empty_cache()
        return freed


class CapturedMemory:
    """Keeps all captured graphs of the process within a budget, by device: steps on two devices run
    in two threads.
    """

    def __init__(
        self,
        budget_bytes: Callable[[torch.device], int],
        release: Callable[[torch.device], None] = trim,
    ) -> None:
        """Set up; nothing is captured yet.

        Args:
            budget_bytes: how much memory captured graphs may take on a device.
            release: frees a device's memory that dropped graphs held.
        """
        self._budget_bytes = budget_bytes
        self._release = release
        self._cards: dict[torch.device, CardMemory] = {}

    def on(self, device: torch.device) -> CardMemory:
        """Return what is captured on a device."""
        card = self._cards.get(device)
        if card is None:  # one object for all threads
            made = CardMemory(device, self._budget_bytes, self._release)
            card = self._cards.setdefault(device, made)
        return card

    @property
    def by_device(self) -> dict[torch.device, int]:
        """Bytes that captured graphs hold on each device."""
        return {device: card.used_bytes for device, card in self._cards.copy().items()}

    @property
    def used_bytes(self) -> int:
        """What they hold on all devices together."""
        return sum(self.by_device.values())

    def budget_bytes(self, device: torch.device) -> int:
        """Return how much they may hold on a device."""
        return self._budget_bytes(device)

    def sweep(self) -> None:
        """Drop what nobody replays any more, because its model is gone."""
        for card in list(self._cards.values()):
            card.sweep()

    def drop_all(self, device: torch.device | None = None) -> int:
        """Free everything, or one device's graphs; returns how many bytes that was."""
        cards = list(self._cards.values()) if device is None else [self.on(device)]
        return sum(card.drop_all() for card in cards)
