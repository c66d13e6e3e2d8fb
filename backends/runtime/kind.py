"""The kinds of one root module: equal places, written down, and the graphs that serve them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..contract import Description
from ..errors import DescriptionError
from ..families.plan import Place, Plan, describe_place, quick_signature
from ..kinds import host_layer
from ..kinds.watch import Watch
from .graph import Graph


@dataclass
class Kind:
    """Equal places of one model, and the graph that serves them; without one, `reason` says why.

    `wide` is a second graph, for calls with more elements than 32 bits can count, where people make
    such calls, or one was made; `unrounded` is another, once layers of a call did not round their
    inputs as the first one does; `left` counts the layers that are the host's, and those that
    unpack their weights, by what they are and how they compute; `watch` knows the code that was
    described.
    """

    label: str
    places: list[Place] = field(default_factory=list)
    graph: Graph | None = None
    reason: str | None = None
    wide: Graph | None = None
    unrounded: Graph | None = None
    left: Counter[tuple[str, str]] = field(default_factory=Counter)
    watch: Watch = field(default_factory=Watch)

    def widen(self, graph_of: Callable[[Description], Graph]) -> None:
        """Have the second graph from now on."""
        if self.wide is None and self.graph is not None:
            label = f"{self.label} (64-bit)"
            self.wide = graph_of(replace(self.graph.description, wide=True, label=label))

    def add_second_graphs(self, graph_of: Callable[[Description], Graph]) -> None:
        """Have the second graphs that calls were found to need."""
        first = self.graph
        if first is None:
            return
        if first.is_outgrown:
            self.widen(graph_of)
        if first.rounds_too_much and self.unrounded is None:
            module = host_layer.unrounded(first.description.module)
            label = f"{self.label} (not rounded)"
            self.unrounded = graph_of(replace(first.description, module=module, label=label))


def describe_kinds(
    plan: Plan,
    device: torch.device,
    dtype: torch.dtype,
    graph_of: Callable[[Description], Graph],
    why_not: Callable[[str], str | None] = lambda _: None,
) -> tuple[list[Kind], dict[str, Kind]]:
    """Write a plan's kinds down for a device and compute dtype.

    Args:
        graph_of: the process's graph for a description.
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
                place, plan, device, dtype, graph_of, known, why_not
            )
        kind.places.append(place)
        if kind.graph is not None:
            kind.left.update(host_layer.count(place.module, kind.graph.description.module))
        of_place[place.name] = kind
    return list({id(kind): kind for kind in quick.values()}.values()), of_place


def _describe(
    place: Place,
    plan: Plan,
    device: torch.device,
    dtype: torch.dtype,
    graph_of: Callable[[Description], Graph],
    known: dict[str, Kind],
    why_not: Callable[[str], str | None],
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
        return Kind(label, reason=f"its {label} is not built as the host's: {error}", watch=watch)
    graph = graph_of(description)
    kind = known.setdefault(graph.key, Kind(label, graph=graph))
    kind.watch.include(watch)
    if place.form.widens and device.type == "cuda":
        kind.widen(graph_of)
    kind.add_second_graphs(graph_of)
    return kind
