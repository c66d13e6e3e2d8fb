"""One graph of this process: where it is in its life, and what its file says about it.

A `CompiledGraph` is shared by every model that has its kind. States: missing -> loading -> ready,
or missing -> building -> ready; a failed build is tried once more by a later prompt, then not
again.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from ..building.claims import BY_ANOTHER_SERVER
from ..building.contract import BuildResult
from ..contract import Compiler, RegionSpec, WeightSpec
from ..errors import BuildError, GraphFileError, ManifestError
from ..kinds.module_tree import parameters, walk
from ..reasons import NOTHING, Reason, of, with_remedy
from ..storing.graph_file import Fault, RefusedFileError
from ..storing.manifest import Facts, read_facts, read_seconds
from ..target import keys

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
        untrusted_in: its folder, if it only lacks trust here.
    """

    reason: Reason
    remedy: Reason
    untrusted_in: Path | None

    @classmethod
    def by(cls, error: GraphFileError) -> Refusal:
        """Return one line for all graphs of an untrusted folder, otherwise the file's own."""
        if isinstance(error, RefusedFileError) and error.fault is Fault.UNTRUSTED:
            return cls(error.of_folder, error.remedy, error.path.parent)
        return cls(error.reason, error.remedy, None)


class Loaded(NamedTuple):
    """A graph that can be called, and what its file or its build says about it.

    Attributes:
        call: takes the list of weights and inputs, and empties it.
        weights: in call order.
        work: elements of its largest tensor, by those of its first input.
        source: "built" or "loaded".
        payload_sha256: of what was loaded.
        build_seconds: of its build, whoever built it.
        load_ms: of loading its file; None for one that was built.
        bytes: of its file; None where there is none.
        binary_bytes: of its kernels on a GPU.
    """

    call: Callable[[list[Any]], Any]
    weights: Sequence[WeightSpec] = ()
    work: float = 1.0
    source: str = "built"
    payload_sha256: str = ""
    build_seconds: float | None = None
    load_ms: float | None = None
    bytes: int | None = None
    binary_bytes: int = 0


class Status(NamedTuple):
    """Where a graph is in its life, with all that belongs to it. Several threads read and write it,
    so it is replaced as a whole.

    Attributes:
        state: where it is.
        reason: why it is not ready, if known.
        remedy: what to do about that; empty for nothing.
        elsewhere: whether another server that shares the store builds it.
        loaded: what can be called, of one that is ready.
    """

    state: State = State.MISSING
    reason: Reason | None = None
    remedy: Reason = NOTHING
    elsewhere: bool = False
    loaded: Loaded | None = None


class CompiledGraph:
    """One kind on one target and one card, and the callable for it once there is one."""

    def __init__(
        self,
        key: str,
        description: RegionSpec,
        backend: Compiler,
        on_drop: Callable[[], None] = lambda: None,
        card: int = 0,
        target: str = "",
    ) -> None:
        """Set up one that is missing.

        Args:
            key: the kind's key.
            description: the kind.
            backend: what compiled it.
            on_drop: called when it is dropped.
            card: the number of the GPU on which it computes; 0 without one.
            target: the name of that card's target, for who shares graphs.
        """
        self._on_drop = on_drop
        self.key = key
        self.card = card
        self.target = target
        self.description = description
        self.backend = backend
        self.status = Status()
        #: Why a file was not used: a damaged one is gone at the next look.
        self.refused: Refusal | None = None
        #: Whether it gave what the host does with any model's weights, and what tells those with
        #: which it did not.
        self.is_proven = False
        self.wrong_with: set[str] = set()
        #: Others' code in parts of a region that it cannot call as the host does, with the reasons.
        self.unfit: dict[str, Reason] = {}
        self.attempts = 1
        #: Where to look for it besides the store, and whether to build it if no file serves; asked
        #: while it is looked for.
        self.folders: tuple[Path, ...] = ()
        self.build_wanted = False

    @property
    def state(self) -> State:
        """Where it is in its life."""
        return self.status.state

    @property
    def loaded(self) -> Loaded | None:
        """What can be called; None if it is not ready."""
        return self.status.loaded

    @property
    def source(self) -> str | None:
        """ "built" or "loaded", of one that is ready."""
        return None if self.status.loaded is None else self.status.loaded.source

    @property
    def reason(self) -> Reason | None:
        """Why it is not ready, if known."""
        return self.status.reason

    @property
    def remedy(self) -> Reason:
        """What to do about that reason; empty for nothing."""
        return self.status.remedy

    @property
    def cost(self) -> int:
        """An estimate of build time: its region's modules; rare graphs come last."""
        module, is_rare = self.description.module, self.description.wide
        return 0 if is_rare else sum(1 for _ in walk(module))

    @property
    def is_pending(self) -> bool:
        """Whether it is being loaded or built."""
        return self.status.state in (State.LOADING, State.BUILDING)

    @property
    def is_elsewhere(self) -> bool:
        """Whether another server that shares the store builds it."""
        return self.status.elsewhere

    @property
    def is_missed(self) -> bool:
        """Whether no file serves, as far as is known, and nobody wants it built: each run looks
        again.
        """
        now = self.status
        again = now.state is State.LOADING and now.reason is not None and not self.build_wanted
        return now.state is State.MISSING or again

    @property
    def is_coming(self) -> bool:
        """Whether it will be ready: it is being built, or will be if no file serves."""
        state = self.status.state
        return state is State.BUILDING or (state is State.LOADING and self.build_wanted)

    @property
    def why_not(self) -> Reason | None:
        """Why it serves no call now, None if it does."""
        now = self.status
        if now.state is State.READY:
            return None
        if now.state is State.BUILDING:
            return BY_ANOTHER_SERVER if now.elsewhere else of("being_compiled")
        if now.state is State.LOADING and not self.is_missed:
            return of("being_loaded")
        return with_remedy(now.reason or of("no_file"), now.remedy)

    def changed(self) -> None:
        """Have what serves calls chosen again: the models that it serves have changed."""
        self._on_drop()

    def drop(self, reason: Reason) -> None:
        """Never use this graph again in this process."""
        self.status = Status(State.FAILED, reason)
        self.attempts = MAX_ATTEMPTS
        self._on_drop()  # what was captured with it must not be replayed any more


def manifest_of(graph: CompiledGraph, facts: Facts, seconds: float) -> dict[str, Any]:
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
        "target": keys.target(description.device, graph.backend, graph.card),
        **plain,
        "built": {
            "seconds": round(seconds, 3),
            "phases": phases,
            "date": datetime.date.today().isoformat(),
        },
    }


def validate_result(graph: CompiledGraph, result: BuildResult) -> tuple[Facts, float]:
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
        raise BuildError(of("bad_result", error=error.reason)) from error


def validate_weights(graph: CompiledGraph, facts: Facts) -> None:
    """Refuse weights that are not parameters of the graph's own region.

    Raises:
        ManifestError: a weight is none.
    """
    known = {
        name: (tuple(meta["shape"]), meta["dtype"])
        for name, meta in parameters(graph.description.module)
    }
    for weight in facts.weights:
        if known.get(weight.name) != (weight.shape, weight.dtype):
            raise ManifestError("weights", f"name {weight.name}, which its region does not have so")
