"""What serves the calls of one root module: its regions as their graphs get ready, those for any
size and those for the very sizes of a hot call.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from ..cuda_graphs.replays import EXACT
from ..families.plan import Call, Place, Placed, Plan
from ..host_api import options
from ..weights.fetching import ModelWeights
from .faults import Faults
from .graph import Graph, State
from .kind import Kind
from .region import Region
from .shared import Shared
from .wiring import Guests


class ForwardSet(NamedTuple):
    """What serves a call.

    Attributes:
        installed: forwards in their modules; the host's code runs everywhere else.
        served: a name that is equal for equal sets.
        recorded: to be called once the call was made, if at all.
    """

    installed: list[Placed]
    served: Hashable
    recorded: Callable[[], None] | None = None


class Forwards:
    """The sets of forwards of one root module, and its regions, which they call."""

    def __init__(self, shared: Shared, faults: Faults, *, past_calls: int = 0) -> None:
        """Args: what all scopes use, which graphs are not used here because ours failed with them,
        and the calls that were served before by regions that are gone.
        """
        self._shared = shared
        self._faults = faults
        self._past_calls = past_calls
        self._past_reasons: dict[str, str] = {}
        self._plan = Plan()
        self._kinds: Mapping[str, Kind] = {}
        self._weights: ModelWeights | None = None
        self._patched: Collection[str] = ()
        self._called: Mapping[str, tuple[Kind, Guests]] = {}
        self._start_anew()

    def _start_anew(self) -> None:
        self._regions: dict[tuple[str, str], Region] = {}
        self._special_regions: dict[tuple[str, str], Either] = {}
        #: What serves a call of which nothing is known.
        self.any_shape = ForwardSet([], EXACT)
        self._of_size: dict[Hashable, ForwardSet] = {}
        self._version = -1  # of the graphs that they were made for
        #: Calls that graphs had served at each place when the run began.
        self._before: Mapping[str, int] = {}

    def bind(self, plan: Plan, kinds: Mapping[str, Kind], weights: ModelWeights) -> None:
        """Start anew over a plan.

        Args:
            kinds: the kind of each place by its name.
            weights: where the root module's are.
        """
        self._past_calls = self.calls
        self._plan, self._kinds, self._weights, self._called = plan, kinds, weights, {}
        self._start_anew()

    def let_go(self) -> None:
        """Keep no module and no weights; what is told of them stays."""
        self._past_calls = self.calls
        regions = self._regions.items()
        self._past_reasons = {name: r.declined for (name, _), r in regions if r.declined}
        self._plan, self._kinds, self._weights = Plan(), {}, None
        self._start_anew()

    # --- a run ------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Start a run: nothing is declined yet, and no graph has served."""
        for region in self._regions.values():
            region.declined = None
        self._before = self._counts()

    def end_run(self) -> None:
        """Keep no weights beyond a run."""
        for region in self._regions.values():
            region.let_weights_go()
        for either in self._special_regions.values():
            either.special.let_weights_go()

    def leave(
        self,
        patched: Collection[str],
        called: Mapping[str, tuple[Kind, Guests]] = MappingProxyType({}),
    ) -> None:
        """Say which places are the host's from now on, for other nodes patched them.

        Args:
            called: those in which others have their code that graphs call, each with its kind.
        """
        self._patched, self._called = patched, called
        self._version = -1

    def refresh(self, special: Callable[[], Mapping[Hashable, Mapping[str, Graph]]]) -> None:
        """Make the forwards of all modules whose graphs are ready, if any came or went.

        Args:
            special: the ready graphs by place of each signature that has a complete set of them.
        """
        if self._version == self._shared.graphs.version:
            return
        self._version = self._shared.graphs.version
        self.any_shape = self._make_set(lambda _, region: region)
        self._of_size = {
            key: self._make_set(partial(self._special, graphs)) for key, graphs in special().items()
        }

    def of(self, key: Hashable) -> ForwardSet:
        """What serves a call of this signature now."""
        return self._of_size.get(key, self.any_shape)

    def recorded(self, record: Callable[[str, Call], Call], done: Callable[[], None]) -> ForwardSet:
        """What serves a call of any size, with a recorder around the call of each place.

        Args:
            record: puts it around a call, by the name of its place.
            done: is to be called once the root module's call was made.
        """
        return self.any_shape._replace(installed=self._make_set(record).installed, recorded=done)

    def asking_ahead(self, values: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
        """Let the host's code ask for weights ahead of a call's blocks only where some may come.

        Args:
            values: the call's arguments.
        """
        regions = self._regions
        all_served = not self._patched and len(self._plan.places) == len(regions) > 0
        if all_served and all(region.keeps_weights for region in regions.values()):
            return options.bringing_nothing_ahead(values)
        return contextlib.nullcontext()

    # --- regions ----------------------------------------------------------------------------------

    def _make_set(self, choose: Callable[[str, Region], Any]) -> ForwardSet:
        """Make the forwards of all modules whose graphs are ready.

        Args:
            choose: what is called at a place, by its name and its any-shape region.
        """
        installed: list[Placed] = []
        served: list[tuple[str, int]] = []
        for dispatch in self._plan.dispatches:
            names = [place.name for place in dispatch.regions]
            if any(name in self._patched for name in names):
                continue
            regions = [region for place in dispatch.regions if (region := self._region(place))]
            if len(regions) == len(names):
                calls = [choose(name, r) for name, r in zip(names, regions, strict=True)]
                installed += dispatch.forwards(calls)
                served += [(name, id(call)) for name, call in zip(names, calls, strict=True)]
        return ForwardSet(installed, tuple(served) or EXACT)

    def _region(self, place: Place) -> Region | None:
        kind, guests = self._kind(place.name)
        if kind is None or kind.graph is None or kind.graph.state is not State.READY:
            return None
        if kind.graph.resting:
            return None
        name = place.name, kind.graph.key
        region = self._regions.get(name)
        if region is None:
            assert self._weights is not None
            region = self._make(place, kind.graph, self._weights)
            self._regions[name] = region
        region.guests = guests
        if region.wide is None:
            region.wide = self._second(place, kind.wide, region)
        if region.unrounded is None:
            region.unrounded = self._second(place, kind.unrounded, region)
        if region.wide is not None:
            region.wide.guests = guests
        return region

    def _kind(self, name: str) -> tuple[Kind | None, Guests | None]:
        """The kind that a place is of now, and what others have in it."""
        return self._called.get(name) or (self._kinds.get(name), None)

    def _second(self, place: Place, graph: Graph | None, region: Region) -> Region | None:
        if graph is None or graph.state is not State.READY:
            return None
        return self._make(place, graph, region.source)

    def _make(self, place: Place, graph: Graph, weights: ModelWeights) -> Region:
        shared = self._shared
        return Region(
            place,
            graph,
            weights,
            shared.comparisons,
            self._faults,
            shared.verification,
            shared.choices,
            len(self._kinds[place.name].places),
        )

    def _special(self, graphs: Mapping[str, Graph], name: str, region: Region) -> Any:
        """The call of a place by its special graph, where there is one."""
        graph = graphs.get(name)
        if graph is None or name in self._called:
            return region
        known = self._special_regions.get((name, graph.key))
        if known is None:
            special = self._make(region.place, graph, region.source)
            known = self._special_regions[name, graph.key] = Either(special, region)
        return known

    def forget(self, graphs: Iterable[Graph]) -> None:
        """Keep nothing of graphs of one size that made room for another's."""
        gone = {graph.key for graph in graphs}
        for name in [name for name in self._special_regions if name[1] in gone]:
            self._past_calls += self._special_regions.pop(name).special.calls

    # --- what to say ------------------------------------------------------------------------------

    @property
    def calls(self) -> int:
        """Calls of regions that graphs have served, but for those that were replayed."""
        regions = list(self._regions.values())
        return self._past_calls + self.special_calls + sum(region.calls for region in regions)

    @property
    def special_calls(self) -> int:
        """Those that graphs of one size have served, of the sizes that are still kept."""
        return sum(either.special.calls for either in list(self._special_regions.values()))

    def _counts(self) -> Counter[str]:
        """Calls that graphs have served, by place."""
        counts: Counter[str] = Counter()
        for (name, _), region in self._regions.items():
            counts[name] += region.calls
        for (name, _), either in self._special_regions.items():
            counts[name] += either.special.calls
        return counts

    def ran(self, since: Mapping[str, int] | None = None) -> frozenset[str]:
        """Return the places that graphs have served since the run began, or since these counts of
        theirs, but for what was replayed.
        """
        before = self._before if since is None else since
        return frozenset(n for n, calls in self._counts().items() if calls > before.get(n, 0))

    @property
    def placed(self) -> frozenset[str]:
        """The places that had a graph when the last step was made, called or not."""
        return frozenset(name for name, _ in self._regions)

    @contextlib.contextmanager
    def watched(self, ran: set[str]) -> Iterator[None]:
        """Put into a set which places graphs serve meanwhile."""
        before = self._counts()
        try:
            yield
        finally:
            ran |= self.ran(before)

    def declined(self, name: str) -> str | None:
        """Why the ready graph of a place did not take a call, if there was one that it did not."""
        kind, _ = self._kind(name)
        graph = None if kind is None else kind.graph
        region = None if graph is None else self._regions.get((name, graph.key))
        return region.declined if region is not None else self._past_reasons.get(name)


class Either:
    """The call of a place by its special graph, and by the any-shape one where that declines."""

    def __init__(self, special: Region, other: Region) -> None:
        """Args: the region of the special graph, and the any-shape one."""
        self.special = special
        self._other = other

    def __call__(self, *inputs: Any) -> Any:
        result = self.special(*inputs)
        return self._other(*inputs) if result is None else result

    def decline(self, reason: str) -> Any:
        return self._other.decline(reason)
