"""Cards for which graphs can be compiled on a machine without one: the facts on which their code
depends. Importing this imports no PyTorch.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
"""

from __future__ import annotations

from typing import NamedTuple

_KIB, _GIB = 1 << 10, 1 << 30


class Card(NamedTuple):
    """The most common card of a compute capability.

    Attributes:
        target: its architecture, as NVIDIA's compiler names it.
        name: of the product.
        capability: (major, minor).
        processors: multiprocessors.
        memory: of the card, in bytes.
        threads: of a multiprocessor, at most.
        shared: memory of a multiprocessor that its threads share, in bytes.
        cache: the level-2 cache, in bytes.
    """

    target: str
    name: str
    capability: tuple[int, int]
    processors: int
    memory: int
    threads: int
    shared: int
    cache: int


_CARDS = (
    Card("sm_75", "NVIDIA T4", (7, 5), 40, 16 * _GIB, 1024, 64 * _KIB, 4 << 20),
    Card("sm_80", "NVIDIA A100", (8, 0), 108, 80 * _GIB, 2048, 164 * _KIB, 40 << 20),
    Card("sm_86", "NVIDIA GeForce RTX 3090", (8, 6), 82, 24 * _GIB, 1536, 100 * _KIB, 6 << 20),
    Card("sm_89", "NVIDIA GeForce RTX 4090", (8, 9), 128, 24 * _GIB, 1536, 100 * _KIB, 72 << 20),
    Card("sm_90", "NVIDIA H100", (9, 0), 132, 80 * _GIB, 2048, 228 * _KIB, 50 << 20),
    Card("sm_100", "NVIDIA B200", (10, 0), 148, 180 * _GIB, 2048, 228 * _KIB, 126 << 20),
    Card("sm_120", "NVIDIA GeForce RTX 5090", (12, 0), 170, 32 * _GIB, 1536, 100 * _KIB, 96 << 20),
)
CARDS = {card.target: card for card in _CARDS}
