"""Graphs that are replayed no more, kept until PyTorch may free them.

From 2.12 on PyTorch frees cuBLAS's workspaces of a stream with any graph that was captured on it,
while other graphs of that stream still write there. All captures of a card share a stream. So a
dropped graph is kept until none of its card is replayed any more; its part of the pool serves the
others meanwhile.

Source: `CUDAGraph::reset` in aten/src/ATen/cuda/CUDAGraph.cpp of torch 2.12-2.15;
https://github.com/pytorch/pytorch/issues/193402
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

#: Of one card, beyond which all that is captured there goes, to be captured anew.
MOST = 128


def has_to_keep() -> bool:
    """Tell whether this PyTorch frees what a stream's graphs share with any of them."""
    return bool(torch.__version__ >= "2.12.dev0")


class Retired:
    """Such graphs of all cards."""

    def __init__(self, has_to_keep: Callable[[], bool] = has_to_keep) -> None:
        """Set up.

        Args:
            has_to_keep: whether they are kept at all.
        """
        self._has_to_keep = has_to_keep
        self._lock = threading.Lock()
        self._kept: dict[torch.device, list[Any]] = {}

    def give_up(self, device: torch.device, graphs: Iterable[Any]) -> None:
        """Take graphs that are replayed no more, once their device has finished with them."""
        if not self._has_to_keep():
            for graph in graphs:
                graph.reset()
            return
        with self._lock:
            self._kept.setdefault(device, []).extend(graphs)

    def let_go(self, device: torch.device) -> None:
        """No graph of a device is replayed any more."""
        with self._lock:
            graphs = self._kept.pop(device, [])
        for graph in graphs:
            graph.reset()

    def are_many(self, device: torch.device) -> bool:
        """Whether a device has more of them than should be kept."""
        return len(self._kept.get(device, ())) >= MOST


#: Of this process: streams are shared by all of it.
RETIRED = Retired()
