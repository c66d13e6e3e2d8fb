"""What all sessions of one server process use together."""

from __future__ import annotations

from dataclasses import dataclass

from ..cuda_graphs.memory import GraphMemory
from ..storing.comparisons import Verified
from .graphs import Graphs


@dataclass(frozen=True)
class Shared:
    """One of each for the process.

    Attributes:
        graphs: all graphs, found, loaded and built.
        verified: the memory of comparisons with eager.
        captured: the memory of all captured calls.
    """

    graphs: Graphs
    verified: Verified
    captured: GraphMemory
