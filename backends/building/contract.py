"""What every builder offers: jobs go in, packed graphs come out, wherever they are built.

`builder.Builder` builds in worker processes of this machine, `farm.FarmBuilder` on others.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..errors import BuildError
from ..storing.graph_file import CompressedPayload
from .pacing import BuildProgress


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


class AnyBuilder(Protocol):
    """Builds jobs. Each method may be called from any thread, and none waits for a build.

    Callbacks of Futures, and listeners, run in threads of the builder and never under a lock.
    """

    @property
    def verdict(self) -> BuildError | None:
        """Why nothing can be built while this process lives; None as far as is known."""

    def submit(self, job: Job) -> Future[BuildResult]:
        """Queue a job and return at once; the Future ends with a `BuildResult` or a `BuildError`.

        A key that waits or is being built gets the same Future again, whoever asks; one that failed
        is tried anew, until there is a verdict. A Future cancelled while it waits drops its job for
        all who share it; a job that runs cannot be cancelled so.
        """

    def progress(self) -> BuildProgress:
        """Return where the current batch stands."""

    def is_building(self) -> bool:
        """Whether a build takes this machine's processors now; asked at each step, so it takes no
        lock.
        """

    def pause(self, paused: bool) -> None:
        """Begin no build, or go on; those that run come to their end."""

    def cancel(self) -> int:
        """Drop what waits and kill what is being built; returns how many jobs those were.

        A pause ends. Their Futures are cancelled, or end with a `CancelledBuildError`.
        """

    def close(self) -> None:
        """Kill what is being built and fail what is left; safe to call twice."""
