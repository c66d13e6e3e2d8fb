"""The kinds of one root module: equal places, described as data, and the graphs that serve them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..code.watch import Watch
from ..contract import RegionSpec
from ..errors import DescriptionError
from ..graphs.compiled_graph import CompiledGraph
from ..operators import left_layers, live_parts
from ..operators.left_layers import LeftLayers
from ..operators.live_parts import LivePart
from ..plans.plan import Place, Plan
from ..plans.specs import describe_live, describe_place, quick_signature
from ..reasons import Reason, of
from .specializations import GIVEN, SPECIALIZATIONS, Needs, Specialization
from .wiring import ForeignCode

#: So many kinds are made for others' code in parts of one; whoever changes more than that is not
#: followed.
MOST_CALLED = 8


@dataclass
class Kind:
    """Equal places of one model, and the graph that serves them; without one, `reason` says why.

    `variants` are further graphs of it, for calls that the first one does not accept; `watch` knows
    the code that was described.

    `called` are further kinds, for the same places while others have code in parts of them, by the
    parts that their graphs call; those places are then `away` from the first kind. `guests` is that
    code. `given` is the one of them for calls that bring such code themselves.
    """

    label: str
    places: list[Place] = field(default_factory=list)
    graph: CompiledGraph | None = None
    reason: Reason | None = None
    variants: dict[Specialization, CompiledGraph] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    called: dict[LivePart, Kind] = field(default_factory=dict)
    given: Kind | None = None
    away: frozenset[str] = frozenset()
    guests: dict[str, ForeignCode] = field(default_factory=dict)
    _left_at: dict[str, Counter[LeftLayers]] = field(default_factory=dict)

    @property
    def here(self) -> list[Place]:
        """The places that it serves now."""
        return [place for place in self.places if place.name not in self.away]

    @property
    def left(self) -> Counter[LeftLayers]:
        """How many layers of these the host runs, or that unpack their weights, by sort and by how
        they compute.
        """
        return sum(map(self._left_in, self.here), Counter[LeftLayers]())

    def _left_in(self, place: Place) -> Counter[LeftLayers]:
        """Counted when first asked for: it takes a tenth of what describing takes."""
        found = self._left_at.get(place.name)
        if found is None:
            found = self._left_at[place.name] = self._count_left(place)
        return found

    def _count_left(self, place: Place) -> Counter[LeftLayers]:
        if self.graph is None:
            return Counter()
        if (others := self.guests.get(place.name)) is not None:
            return live_parts.count(self.graph.description.module, others.live, others.words)
        return left_layers.count(place.module, self.graph.description.module)

    def let_go(self) -> None:
        """Keep what reports need of its places, but none of their modules."""
        for place in self.places:
            self._left_in(place)
        gone = torch.nn.Module()
        self.places = [replace(place, module=gone) for place in self.places]

    @property
    def further(self) -> dict[str, CompiledGraph]:
        """Its graphs for calls that the first one does not accept, by what those need (`Needs`)."""
        found = {each.name: graph for each, graph in self.variants.copy().items()}
        given = None if self.given is None else self.given.graph
        return found if given is None else {**found, GIVEN: given}

    @property
    def second_graphs(self) -> list[CompiledGraph]:
        """The graphs for calls that the first one cannot serve."""
        called = [
            each for kind in self.called.values() for each in (kind.graph, *kind.second_graphs)
        ]
        return [*self.variants.values(), *(each for each in called if each is not None)]

    def calling(
        self, live: LivePart, graph_of: Callable[[RegionSpec], CompiledGraph]
    ) -> Kind | None:
        """Return the kind of its places while a graph calls some of their parts; None without such
        a graph, or if there are too many.
        """
        if live not in self.called and self.graph is not None and len(self.called) < MOST_CALLED:
            place, first = self.places[0], self.graph.description
            try:
                graph = graph_of(describe_live(place, first, live))
            except DescriptionError as error:
                self.called[live] = Kind(self.label, reason=error.reason, watch=self.watch)
            else:
                label = graph.description.label
                self.called[live] = Kind(label, graph=graph, watch=self.watch)
        return self.called.get(live)

    def note_away(self, guests: Mapping[str, tuple[Kind, ForeignCode]]) -> None:
        """Note in which of its places others have code, and the kind of each."""
        self.away = frozenset(place.name for place in self.places if place.name in guests)
        for kind in self.called.values():
            kind.places, kind.guests, kind._left_at = [], {}, {}
        for place in self.places if self.away else ():
            if place.name in self.away:
                kind, others = guests[place.name]
                kind.places.append(place)
                kind.guests[place.name] = others

    def add_variants(self, needs: Needs, graph_of: Callable[[RegionSpec], CompiledGraph]) -> None:
        """Have the graphs that calls of the model need."""
        if (first := self.graph) is None:
            return
        if self.given is None and self.places and (first.key, GIVEN) in needs:
            self.given = self.calling(LivePart(False, self.places[0].form.given), graph_of)
        for kind in self.called.values():
            kind.add_variants(needs, graph_of)
        for each in SPECIALIZATIONS:
            if each not in self.variants and (first.key, each.name) in needs:
                self.variants[each] = graph_of(each.of(first.description))


def hand_over(
    of_place: Mapping[str, Kind],
    guests: Mapping[str, ForeignCode],
    left: dict[str, Reason],
    kinds: Iterable[Kind],
    graph_of: Callable[[RegionSpec], CompiledGraph],
) -> dict[str, tuple[Kind, ForeignCode]]:
    """Find the kinds that serve the places in which others have code now.

    Args:
        of_place: the kind of each place without others' code.
        guests: others' code in a place.
        left: the places that the host runs, with a reason; those that no kind serves are added.
        kinds: all of them.
        graph_of: as of `describe_kinds`.
    """
    found = {}
    for name, each in guests.items():
        first = of_place[name]
        if name in left or first.graph is None:
            continue
        if (kind := first.calling(each.live, graph_of)) is not None:
            found[name] = kind, each
        else:
            left[name] = each.why
    for kind in kinds:
        kind.note_away(found)
    return found


def describe_kinds(
    plan: Plan,
    device: torch.device,
    dtype: torch.dtype,
    graph_of: Callable[[RegionSpec], CompiledGraph],
    needs: Needs,
    why_not: Callable[[str], Reason | None] = lambda _: None,
) -> tuple[list[Kind], dict[str, Kind]]:
    """Describe a plan's kinds for a device and compute dtype.

    Args:
        graph_of: the process's graph for a description.
        needs: what calls of the model needed until now; what is foreseen is added.
        why_not: says why a kind of this label gets none, or None.

    Returns:
        The kinds, and the kind of each place by its name.
    """
    known: dict[str, Kind] = {}
    quick: dict[Any, Kind] = {}
    of_place = {}
    for place in plan.places:
        signature = quick_signature(place)
        kind = quick.get(signature)
        if kind is None:
            kind = quick[signature] = _describe(
                place, plan, device, dtype, graph_of, needs, known, why_not
            )
        kind.places.append(place)
        of_place[place.name] = kind
    return list({id(kind): kind for kind in quick.values()}.values()), of_place


def _describe(
    place: Place,
    plan: Plan,
    device: torch.device,
    dtype: torch.dtype,
    graph_of: Callable[[RegionSpec], CompiledGraph],
    needs: Needs,
    known: dict[str, Kind],
    why_not: Callable[[str], Reason | None],
) -> Kind:
    label, watch = type(place.module).__name__, Watch()
    try:
        label = place.form.label(place.module)
        if (reason := why_not(label)) is not None:
            return Kind(label, reason=reason, watch=watch)
        description = describe_place(place, plan, dtype=dtype, device=device.type, watch=watch)
    except DescriptionError as error:
        return Kind(label, reason=error.reason, watch=watch)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        return Kind(label, reason=of("part_built_unlike", part=label, error=error), watch=watch)
    graph = graph_of(description)
    kind = known.setdefault(graph.key, Kind(label, graph=graph))
    kind.watch.include(watch)
    needs |= {
        (graph.key, each.name) for each in SPECIALIZATIONS if each.foreseen(place, device.type)
    }
    kind.add_variants(needs, graph_of)
    return kind
