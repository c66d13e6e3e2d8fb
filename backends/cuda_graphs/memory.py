"""The VRAM of captured CUDA graphs: one pool, a budget, and a place in the host's list of models.

What the host wants to free it looks for among its loaded models; so this memory stands there as
one, and is given up when it is asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..host_api.memory import LoadedEntry, empty_cache
from . import driver


class Held(Protocol):
    """What holds memory: a `CapturedCall`."""

    def free(self) -> None:
        """Give it back."""


class Owner(Protocol):
    """Whoever replays a graph, told when it is gone."""

    def forget(self, graph: Any) -> None:
        """The graph's memory was given back."""


class CapturedMemory:
    """Keeps all captured graphs of the process within a budget."""

    def __init__(
        self,
        budget_bytes: Callable[[torch.device], int],
        release: Callable[[torch.device], None] = driver.trim,
    ) -> None:
        """Args: how much memory captured graphs may take on a device, and what gives back to it
        what dropped ones held.
        """
        self._budget_bytes = budget_bytes
        self._release = release
        self._owners: dict[Held, weakref.ref[Owner]] = {}
        self._taken = 0
        self._pool: Any = None
        self._entry: LoadedEntry | None = None
        self._device: torch.device | None = None

    @property
    def used_bytes(self) -> int:
        """Memory that the captured graphs hold together; what they need in between is shared."""
        return self._taken

    def sweep(self) -> None:
        """Let go of what nobody replays any more: its model is gone."""
        for graph, owner in list(self._owners.items()):
            if owner() is None:
                self.drop(graph)

    def pool(self) -> Any:
        """Return the pool to capture into."""
        self.sweep()
        if not self._owners or self._pool is None:  # an emptied pool must not be used again
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def add(self, graph: Held, owner: Owner, device: torch.device, size: int) -> str | None:
        """Count a new graph that took `size` bytes more.

        Over the budget all graphs go, since memory that they share is free only without any: those
        that are still wanted are captured anew. A graph that is too large by itself is not kept.

        Returns:
            Why the graph cannot be kept at all, or None.
        """
        alone = not self._owners
        self._device = device
        self._owners[graph] = weakref.ref(owner)
        self._taken += max(size, 0)
        if self._taken <= (budget := self._budget_bytes(device)):
            self._list()
            return None
        needed = self._taken
        self.drop_all()
        if not alone:
            return None
        return f"its memory ({needed >> 20} MiB) is over the budget of {budget >> 20} MiB"

    def holds(self, graph: Held) -> bool:
        """Tell whether a graph was not let go."""
        return graph in self._owners

    def drop(self, graph: Held) -> None:
        """Let one graph go; its memory serves the others, and after the last one is given back."""
        reference = self._owners.pop(graph, None)
        graph.free()
        if reference is not None and (owner := reference()) is not None:
            owner.forget(graph)
        if not self._owners:
            self._taken = 0
            if self._device is not None:
                self._release(self._device)

    def drop_all(self) -> int:
        """Give everything back; returns how many bytes that was."""
        freed = self.used_bytes
        for graph in list(self._owners):
            self.drop(graph)
        if freed:
            empty_cache()
        return freed

    def _list(self) -> None:
        """Stand among the host's loaded models while there is something to give back."""
        if self._entry is None:
            assert self._device is not None
            self._entry = LoadedEntry(self._device, lambda: self.used_bytes, self.drop_all)
        self._entry.list()
