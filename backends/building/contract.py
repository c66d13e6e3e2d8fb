"""What goes into a builder and what comes out, wherever it is built: jobs, and packed graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..storing.graph_file import CompressedPayload


@dataclass(frozen=True)
class Job:
    """One graph to build: plain data for a worker.

    Attributes:
        key: the graph's key; one job at a time for each.
        label: what a user reads, such as "ResBlock 320->640".
        cost: any measure of the work; the largest is built first.
        task: JSON-plain data for `build.run`.
    """

    key: str
    label: str
    cost: int
    task: dict[str, Any]


class BuildResult(NamedTuple):
    """A built graph: its packed payload, facts for the manifest, and the seconds it took."""

    key: str
    payload: CompressedPayload
    facts: dict[str, Any]
    seconds: float
