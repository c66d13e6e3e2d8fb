"""Whether allocations of CUDA graphs lie apart, on two cards that map each other's memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

from ..pack import import_engine
from .cards import two_cards

#: Of a card, at a time.
GRAPHS = 3


def graphs_on_cards(*, rounds: int = 40) -> dict[str, Any]:
    """Capture graphs of many sizes on two cards that map each other's memory, let all of a card's
    go by turns, and look whether allocations of one graph lie over one another. Needs two GPUs.

    Returns:
        {"allocator", "wrong": replays with a wrong number in them, of "ours" (graphs as we make
        them) and of "plain" (PyTorch's own, for which the driver may be at fault)}
    """
    import torch

    import_engine()
    from warmgraph_backends.cuda_graphs.driver import make_graph

    cards = two_cards()
    for one, other in itertools.permutations(cards):
        torch.ones(1000, device=one).to(other)  # PyTorch has them map each other's memory
    # What plain ones spoil stays so in this process: they come last.
    makers: dict[str, Callable[[Any], Any]] = {
        "ours": make_graph,
        "plain": lambda card: torch.cuda.CUDAGraph(),
    }
    wrong = {name: _overlaid(cards, make, rounds) for name, make in makers.items()}
    return {"allocator": torch.cuda.get_allocator_backend(), "wrong": wrong}


def _overlaid(cards: list[Any], make: Callable[[Any], Any], rounds: int) -> int:
    """How many replays found a number in a tensor that was written into another one."""
    chosen, numbers = random.Random(1), itertools.count(1)
    live: dict[Any, list[_Filling]] = {card: [] for card in cards}
    wrong = 0
    for _ in range(rounds):
        for card, graphs in live.items():
            while len(graphs) < GRAPHS:
                sizes = [chosen.randint(1, 128) for _ in range(chosen.randint(2, 14))]
                graphs.append(_Filling(card, make(card), sizes, numbers))
        wrong += sum(graph.is_wrong() for graphs in live.values() for graph in graphs)
        _empty(chosen.choice(cards), live)
    for card in cards:
        _empty(card, live)
    return wrong


def _empty(card: Any, live: dict[Any, list[_Filling]]) -> None:
    """Let all graphs of a card go, and give back what they had."""
    import torch

    from warmgraph_backends.cuda_graphs import driver

    for filling in live[card]:
        filling.graph.reset()
    live[card] = []
    driver.trim(card)
    torch.cuda.empty_cache()


class _Filling:
    """A graph that fills tensors, each with a number of its own, and says what is in them."""

    def __init__(self, card: Any, graph: Any, sizes: list[int], numbers: Iterator[int]) -> None:
        """Capture it.

        Args:
            sizes: of the tensors, in MiB.
        """
        import torch

        from warmgraph_backends.cuda_graphs import streams

        self.graph = graph
        self._card, self._values = card, [next(numbers) for _ in sizes]
        self._found = torch.zeros(len(sizes), 2, dtype=torch.int32, device=card)
        stream = streams.shared(card)
        torch.cuda.synchronize(card)
        with torch.cuda.stream(stream):
            pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            self._fill(sizes)
            graph.capture_end()

    def _fill(self, sizes: list[int]) -> None:
        """Every tensor that it makes is gone when this returns, as a capture wants it."""
        import torch

        filled = [
            torch.full((mib << 18,), value, dtype=torch.int32, device=self._card)
            for mib, value in zip(sizes, self._values, strict=True)
        ]
        for row, tensor in zip(self._found, filled, strict=True):
            row.copy_(torch.stack([tensor.amin(), tensor.amax()]))

    def is_wrong(self) -> bool:
        """Whether a tensor has another number than its own in it."""
        import torch

        with torch.cuda.device(self._card):
            self.graph.replay()
            torch.cuda.synchronize(self._card)
        found: list[list[int]] = self._found.tolist()
        return found != [[value, value] for value in self._values]
