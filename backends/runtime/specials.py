"""Graphs for the very sizes of hot calls.

An any-shape graph is right at every size and stays beneath; one compiled for fixed sizes saves what
the compiler must leave open for the others. A call of one signature gets a *set*: for each kind a
graph at the sizes that its places see in that call. It is used once all of it has come.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from ..contract import Description
from ..graphs.graph import Graph, State
from ..plans.plan import Call
from ..reasons import Reason

#: Signatures of one model that have a set at a time; their files stay in the store.
MAX_SETS = 4
#: Elements of a place's largest tensor, beyond which it gets no special graph: building one, and
#: comparing it with eager, takes that size, a few times over, beside the model that runs.
MAX_ELEMENTS = 2**27
#: Runs for which a set that nobody used keeps its place against a hotter size.
STALE_RUNS = 10
#: Signatures whose sizes are remembered.
MAX_KNOWN = 64


class Specials:
    """Which signatures of one root module have a set, and which should get one."""

    def __init__(self, runs_before: Callable[[], int | None]) -> None:
        """Set up; there are no sets yet.

        Args:
            runs_before: runs of one signature that come before its set is asked for; None: it never
                is.
        """
        self._runs_before = runs_before
        self._runs: Counter[Hashable] = Counter()
        self._seen: set[Hashable] = set()
        self._last_seen: dict[Hashable, int] = {}
        self._run = 0
        #: Whether calls count: those of Warm Up are nobody's wish for these sizes.
        self.counts = True
        self._sizes: dict[Hashable, dict[str, tuple[Any, ...]]] = {}
        self._sets: dict[Hashable, dict[str, Graph]] = {}

    def fresh(self) -> Specials:
        """Return one for another root module, by the same rule."""
        return Specials(self._runs_before)

    @property
    def graphs(self) -> list[Graph]:
        """The graphs of all sets, each once."""
        found = [graph for made in list(self._sets.values()) for graph in list(made.values())]
        return list(dict.fromkeys(found))

    def clear(self) -> None:
        """Forget everything: the kinds are not what they were."""
        self._runs.clear()
        self._seen.clear()
        self._last_seen.clear()
        self._sizes.clear()
        self._sets.clear()

    def begin_run(self) -> list[Hashable]:
        """Count the signatures of the last run; returns those that should get a set now."""
        self._run += 1
        for key in self._seen & self._sizes.keys():
            self._runs[key] += 1
            self._last_seen[key] = self._run
        self._seen.clear()
        if (before := self._runs_before()) is None:
            return []
        places = MAX_SETS - len(self._sets) + len(self._stale())
        due = [k for k in self._sizes if k not in self._sets and self._runs[k] >= max(before, 1)]
        return sorted(due, key=self._last_seen.__getitem__)[::-1][:places]

    def _stale(self) -> list[Hashable]:
        """The sets that nobody used for long, the one used longest ago first."""
        last = self._last_seen
        stale = [key for key in self._sets if last[key] < self._run - STALE_RUNS]
        return sorted(stale, key=last.__getitem__)

    def see(self, key: Hashable) -> bool:
        """Note a call; returns whether its sizes are still to be recorded."""
        if not self.counts or self._runs_before() is None:
            return False
        self._seen.add(key)
        return key not in self._sizes

    def record(self, key: Hashable) -> tuple[Callable[[str, Call], Call], Callable[[], None]]:
        """Return what puts a recorder around the call of each place, by its name, and what is to be
        called once all of them were called.
        """
        sizes: dict[str, tuple[Any, ...]] = {}

        def done() -> None:
            if not sizes:  # it was replayed
                return
            while len(self._sizes) >= MAX_KNOWN:
                self._forget(next(k for k in self._sizes if k not in self._sets))
            self._sizes[key] = sizes
            self._last_seen[key] = self._run

        return lambda name, call: _Recorder(name, call, sizes), done

    def add(
        self,
        key: Hashable,
        any_shape: Callable[[str], Graph | None],
        special: Callable[[Description], Graph],
    ) -> tuple[Hashable, list[Graph]] | None:
        """Make the set of a signature from the sizes that were recorded; one that nobody used for
        long makes room for it.

        Args:
            any_shape: the graph of a place's kind, None where it has none.
            special: the process's graph for a description.

        Returns:
            The signature that lost its set, if one did, and the graphs that no set needs any more.
        """
        lost = None
        if len(self._sets) >= MAX_SETS:
            oldest = self._stale()[0]
            gone = self._sets.pop(oldest)
            self._forget(oldest)
            used = {id(graph) for graph in self.graphs}
            lost = oldest, [g for g in dict.fromkeys(gone.values()) if id(g) not in used]
        made: dict[str, Graph] = {}
        for name, inputs in self._sizes[key].items():
            graph = any_shape(name)
            work = 1.0 if graph is None or graph.loaded is None else graph.loaded.work
            if graph is not None and math.prod(inputs[0]) * math.ceil(work) <= MAX_ELEMENTS:
                description = graph.description
                made[name] = special(description.at(_sizes_of(description, inputs)))
        self._sets[key] = made
        return lost

    def _forget(self, key: Hashable) -> None:
        """It must become hot anew."""
        for table in (self._sizes, self._runs, self._last_seen):
            table.pop(key, None)

    def complete(self) -> Mapping[Hashable, Mapping[str, Graph]]:
        """Return the ready graphs by place of every set of which nothing more is to come."""
        found = {}
        for key, made in self._sets.items():
            states = {graph.state for graph in made.values()}
            ready = {n: g for n, g in made.items() if g.state is State.READY}
            if ready and not states & {State.LOADING, State.BUILDING, State.MISSING}:
                found[key] = ready
        return found


class _Recorder:
    def __init__(self, name: str, call: Call, sizes: dict[str, tuple[Any, ...]]) -> None:
        self._name, self._call, self._sizes = name, call, sizes

    def __call__(self, *inputs: Any) -> Any:
        self._sizes[self._name] = tuple(
            tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in inputs
        )
        return self._call(*inputs)

    def decline(self, reason: Reason) -> Any:
        return self._call.decline(reason)


def _sizes_of(description: Description, inputs: Sequence[Any]) -> dict[str, int]:
    """Return the value of each symbol in a call with inputs of these sizes."""
    found: dict[str, int] = {}
    for spec, sizes in zip(description.inputs, inputs, strict=True):
        given = (sizes,) if spec.dtype == "int" else sizes
        found.update({d: n for d, n in zip(spec.dims, given, strict=True) if isinstance(d, str)})
    return found
