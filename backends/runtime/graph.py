"""One graph of this process: where it is in its life, and what its file says about it.

A `Graph` is shared by every model that has its kind. States: missing -> loading -> ready, or
missing -> building -> ready; a failed build is tried once more by a later prompt, then not again.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from ..building.builder import BuildResult
from ..building.claims import BY_ANOTHER_SERVER
from ..contract import Backend, Description, WeightSpec
from ..errors import BuildError, ManifestError
from ..kinds import keys
from ..storing.manifest import Facts, read_facts, read_seconds

#: Builds of one graph in one process; a worker may have died of something that has passed.
MAX_ATTEMPTS = 2


class State(str, Enum):
    """Where a graph is in its life."""

    MISSING = "missing"
    LOADING = "loading"
    BUILDING = "building"
    READY = "ready"
    FAILED = "failed"


class Refusal(NamedTuple):
    """Why a graph's file was not used.

    Attributes:
        reason, remedy: in words, and what to do.
        untrusted_in: its folder, if all that it lacks is that somebody trusts it here.
    """

    reason: str
    remedy: str
    untrusted_in: Path | None


class Graph:
    """One kind on one target, and the callable for it once there is one."""

    def __init__(
        self,
        key: str,
        description: Description,
        backend: Backend,
        on_drop: Callable[[], None] = lambda: None,
    ) -> None:
        """Args: the kind, what compiled it, and who wants to know when it is dropped."""
        self._on_drop = on_drop
        self.key = key
        self.description = description
        self.backend = backend
        self.state = State.MISSING
        self._why: tuple[str | None, str] = None, ""
        #: Why a file was not used: a damaged one is gone at the next look.
        self.refused: Refusal | None = None
        #: Why it is not used until the next run begins, if so.
        self.resting: str | None = None
        #: Classes of weights with which a comparison spoke against it once.
        self.doubts: set[str] = set()
        #: Others' code in parts of a region that it cannot call as the host does, with the reasons.
        self.unfit: dict[str, str] = {}
        self.call: Callable[[list[Any]], Any] | None = None
        self.weights: list[WeightSpec] = []
        self.work = 1.0
        self.source: str | None = None
        self.payload_sha256 = ""
        self.build_seconds: float | None = None
        self.load_ms: float | None = None
        self.bytes: int | None = None
        self.binary_bytes = 0
        self.attempts = 1
        #: Whether another server that shares the store builds it.
        self.built_elsewhere = False
        #: Where to look for it besides the store, and whether to build it if no file serves; asked
        #: while it is looked for.
        self.folders: tuple[Path, ...] = ()
        self.build_wanted = False

    @property
    def reason(self) -> str | None:
        """Why it is not ready, in words, where that is known."""
        return self._why[0]

    @property
    def remedy(self) -> str:
        """What to do about that reason; empty where there is nothing."""
        return self._why[1]

    def explain(self, reason: str | None, remedy: str = "") -> None:
        """Say why it is not ready and what to do about it: what was said before is of the past."""
        self._why = reason, remedy

    @property
    def is_pending(self) -> bool:
        """Whether it is on its way."""
        return self.state in (State.LOADING, State.BUILDING)

    @property
    def is_missed(self) -> bool:
        """Whether no file serves, as far as is known, and nobody wants it built: each run looks for
        it again.
        """
        again = self.state is State.LOADING and self.reason is not None and not self.build_wanted
        return self.state is State.MISSING or again

    @property
    def is_coming(self) -> bool:
        """Whether it will surely be there: it is built, or will be if no file serves."""
        return self.state is State.BUILDING or (self.state is State.LOADING and self.build_wanted)

    @property
    def why_not(self) -> str | None:
        """Why it serves no call now, None where it does."""
        if self.state is State.READY:
            return self.resting
        if self.state is State.BUILDING:
            return BY_ANOTHER_SERVER if self.built_elsewhere else "it is being compiled"
        if self.state is State.LOADING and not self.is_missed:
            return "it is being loaded"
        text = self.reason or "no compiled file"
        return f"{text}; {self.remedy}" if self.remedy else text

    def rest(self, reason: str) -> None:
        """Leave its calls to the host until the next run begins."""
        self.resting = reason
        self._on_drop()  # what serves calls is chosen anew, and captured so

    def wake(self) -> None:
        """A run begins: use it again."""
        if self.resting is not None:
            self.resting = None
            self._on_drop()

    def drop(self, reason: str) -> None:
        """Never use this graph again in this process."""
        self.state, self.call = State.FAILED, None
        self.explain(reason)
        self.attempts = MAX_ATTEMPTS
        self.built_elsewhere = False
        self._on_drop()  # what was captured with it must not be replayed any more


def manifest_of(graph: Graph, facts: Facts, seconds: float) -> dict[str, Any]:
    """Return what a graph file says about itself; the file layer adds format, payload and
    signature.
    """
    description = graph.description
    plain = facts.to_dict()
    phases = plain.pop("phases")
    return {
        "key": graph.key,
        "kind": description.label,
        "structure": keys.structure(description),
        **keys.inputs(description),
        "target": keys.target(description.device, graph.backend),
        **plain,
        "built": {
            "seconds": round(seconds, 3),
            "phases": phases,
            "date": datetime.date.today().isoformat(),
        },
    }


def validate_result(graph: Graph, result: BuildResult) -> tuple[Facts, float]:
    """Return what a worker said about its graph and the seconds that it took, checked as strictly
    as what a file says.

    Raises:
        BuildError: it is not as it must be.
    """
    try:
        facts = read_facts(result.facts)
        validate_weights(graph, facts)
        return facts, read_seconds(result.seconds)
    except ManifestError as error:
        raise BuildError(f"a worker's result is not as it must be: {error.reason}") from error


def validate_weights(graph: Graph, facts: Facts) -> None:
    """Refuse weights that are no parameters of the graph's own region, whoever named them.

    Raises:
        ManifestError: a weight is none.
    """
    parameters = dict(_parameters(graph.description.module))
    for weight in facts.weights:
        if parameters.get(weight.name) != (weight.shape, weight.dtype):
            raise ManifestError("weights", f"name {weight.name}, which its region does not have so")


def _parameters(
    module: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    for name, meta in module["parameters"].items():
        if meta is not None:
            yield f"{prefix}{name}", (tuple(meta["shape"]), meta["dtype"])
    for name, child in module["modules"]:
        yield from _parameters(child, f"{prefix}{name}.")
