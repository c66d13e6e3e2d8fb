"""What serves the calls of one root module: its regions, as their graphs get ready."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..cuda_graphs.pieces import Pieces
from ..cuda_graphs.replays import EXACT
from ..graphs.compiled_graph import CompiledGraph, State
from ..host_api import options
from ..plans.plan import Place, Placed, Plan
from ..reasons import Reason
from ..weights.fetching import ModelWeights
from .faults import Faults
from .kind import Kind
from .region import Region
from .shared import Shared
from .specializations import CallStats
from .wiring import ForeignCode


class ForwardSet(NamedTuple):
    """What serves calls.

    Attributes:
        installed: forwards in their modules; the host's code runs everywhere else.
        served: a name, equal for equal sets.
        regions: what they call, at each place first.
        aids: the graphs at no place that help theirs, by key.
    """

    installed: list[Placed]
    served: Hashable
    regions: Sequence[Region] = ()
    aids: tuple[str, ...] = ()


#: The host's code alone.
NOTHING_SERVES = ForwardSet([], EXACT)


class Dispatcher:
    """The forwards of one root module, and its regions, which they call."""

    def __init__(
        self, shared: Shared, faults: Faults, account: CallStats, pieces: Pieces | None = None
    ) -> None:
        """Set up; there are no regions.

        Args:
            shared: what all scopes use.
            faults: which graphs are not used here because our code failed with them.
            account: what the regions note of their calls.
            pieces: replays single places; None: they are not replayed.
        """
        self._pieces = pieces
        self._shared = shared
        self._faults = faults
        self._account = account
        self._past_reasons: dict[str, Reason] = {}
        self._plan = Plan()
        self._kinds: Mapping[str, Kind] = {}
        self._weights: ModelWeights | None = None
        self._patched: Collection[str] = ()
        self._called: Mapping[str, tuple[Kind, ForeignCode]] = {}
        self._aids: Sequence[Kind] = ()
        self._start_anew()

    def _start_anew(self) -> None:
        #: By the keys of their graphs, at each place that had one, by its name.
        self._regions: dict[str, dict[str, Region]] = {}
        #: What serves calls now, and what the last one was made with.
        self.now = self.made_with = NOTHING_SERVES
        self._version = -1  # keys of the graphs it was made for
        #: Calls that graphs had served at each place when the run began.
        self._before: Mapping[str, int] = {}

    def bind(
        self,
        plan: Plan,
        kinds: Mapping[str, Kind],
        weights: ModelWeights,
        aids: Sequence[Kind] = (),
    ) -> None:
        """Start again with a plan.

        Args:
            kinds: the kind of each place by its name.
            weights: where the root module's are.
            aids: kinds at no place, which help other kinds' graphs.
        """
        self._plan, self._kinds, self._weights, self._called = plan, kinds, weights, {}
        self._aids = aids
        self._start_anew()

    def let_go(self) -> None:
        """Keep no module and no weights; their counts stay."""
        self._past_reasons = {r.place.name: r.declined for r in self._all() if r.declined}
        self._plan, self._kinds, self._weights = Plan(), {}, None
        self._start_anew()

    # --- a run ------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Start a run: nothing is declined yet, and no graph has served."""
        for region in self._all():
            region.begin_run()
        self.made_with = NOTHING_SERVES
        self._before = self._counts()

    def end_run(self) -> None:
        """Keep no weights beyond a run."""
        for region in self._all():
            region.let_weights_go()

    def leave(
        self,
        patched: Collection[str],
        called: Mapping[str, tuple[Kind, ForeignCode]] = MappingProxyType({}),
    ) -> None:
        """Set which places the host runs from now on, because other nodes patched them.

        Args:
            called: places in which graphs call others' code, each with its kind.
        """
        self._patched, self._called = patched, called
        self._version = -1

    def refresh(self) -> None:
        """Update the forwards of all modules with ready graphs, if any graph came or went."""
        if self._version == self._shared.graphs.version:
            return
        self._version = self._shared.graphs.version
        self.now = self._make_set()

    def asking_ahead(
        self, serving: ForwardSet, values: Iterable[Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Let the host's code prefetch weights for a call's blocks only where some need loading.

        Args:
            serving: what serves the call.
            values: its arguments.
        """
        regions = serving.regions
        all_served = len(self._plan.places) == len(regions) > 0
        if all_served and all(region.keeps_weights for region in regions):
            return options.bringing_nothing_ahead(values)
        return contextlib.nullcontext()

    # --- regions ----------------------------------------------------------------------------------

    def _make_set(self) -> ForwardSet:
        """Make the forwards of all modules whose graphs are ready."""
        installed: list[Placed] = []
        served: list[Region] = []
        for dispatch in self._plan.dispatches:
            if any(place.name in self._patched for place in dispatch.regions):
                continue
            found = [self._region(place) for place in dispatch.regions]
            regions = [region for region in found if region is not None]
            if len(regions) == len(found) or (dispatch.apart and regions):
                installed += dispatch.forwards(found)
                served += regions
        graphs = (kind.graph for kind in self._aids if kind.graph is not None)
        aids = tuple(graph.key for graph in graphs if graph.state is State.READY)
        names = tuple((region.place.name, id(region), aids) for region in served)
        return ForwardSet(installed, names or EXACT, served, aids)

    def _region(self, place: Place) -> Region | None:
        """Return what is called at a place, None where its kind has no graph."""
        kind, guests = self._kind(place.name)
        return None if kind is None else self._by_kind(place, kind, guests)

    def _by_kind(self, place: Place, kind: Kind, guests: ForeignCode | None) -> Region | None:
        first = kind.graph
        if first is None or first.state is not State.READY:
            return None
        if self._against(first, guests) is not None:
            return None
        graphs = [first, *(graph for graph in kind.variants.values() if graph.state is State.READY)]
        regions = [self._of(place, graph, first.key) for graph in graphs]
        given = None if kind.given is None else self._by_kind(place, kind.given, guests)
        for number, region in enumerate(regions, 1):
            region.serve(guests, regions[number:], given)
        return regions[0]

    def _against(self, graph: CompiledGraph, guests: ForeignCode | None) -> Reason | None:
        """Why comparisons refuse a graph with this model's weights."""
        return self._account.verdicts.of(graph, "" if guests is None else guests.code).problem

    def _kind(self, name: str) -> tuple[Kind | None, ForeignCode | None]:
        """The kind of a place now, and others' code in it."""
        return self._called.get(name) or (self._kinds.get(name), None)

    def _of(self, place: Place, graph: CompiledGraph, kind: str) -> Region:
        """Return the region of a place by a graph of its kind, by the kind's key."""
        here = self._regions.setdefault(place.name, {})
        region = here.get(graph.key)
        if region is None:
            assert self._weights is not None
            shared = self._shared
            region = here[graph.key] = Region(
                place,
                graph,
                self._weights,
                self._faults,
                shared.verification,
                shared.choices,
                self._account,
                kind,
                len(self._kinds[place.name].places),
                self._pieces,
            )
        return region

    # --- what to say ------------------------------------------------------------------------------

    def _counts(self) -> Counter[str]:
        """Calls that graphs have served, by place."""
        counts: Counter[str] = Counter()
        for region in self._all():
            counts[region.place.name] += region.calls
        return counts

    def ran(self, since: Mapping[str, int] | None = None) -> frozenset[str]:
        """Return the places that graphs have served since the run began, or since these counts,
        except replayed calls.
        """
        before = self._before if since is None else since
        return frozenset(n for n, calls in self._counts().items() if calls > before.get(n, 0))

    @property
    def placed(self) -> frozenset[str]:
        """The places whose graphs the last step could call, except those that were compared."""
        found = {region.place.name: region for region in self.made_with.regions}
        return frozenset(n for n, region in found.items() if not region.is_compared)

    @contextlib.contextmanager
    def watched(self, ran: set[str]) -> Iterator[None]:
        """Add to a set the places that graphs serve meanwhile."""
        before = self._counts()
        try:
            yield
        finally:
            ran |= self.ran(before)

    def declined(self, name: str) -> Reason | None:
        """Why no ready graph of a place accepted some call; or why none is served yet."""
        kind, guests = self._kind(name)
        graph = None if kind is None else kind.graph
        if graph is not None and (problem := self._against(graph, guests)) is not None:
            return problem
        here = list(self._regions.get(name, {}).values())
        if sum(region.calls for region in here) > self._before.get(name, 0):
            reasons = [region.declined for region in here]
        else:
            reasons = [region.declined or region.unsure for region in here]
        return next((each for each in reasons if each is not None), self._past_reasons.get(name))

    def _all(self) -> list[Region]:
        """The regions of all places; asked from any thread."""
        return [r for here in list(self._regions.values()) for r in list(here.values())]
