"""What one of our nodes attached to a host object: options, scope, and what to report."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from ..contract import CallForm, Compiler, WhenMissing
from ..families.catalogue import plan_model
from ..graphs.compiled_graph import CompiledGraph, State
from ..graphs.learned_models import LearnedModel
from ..live import Live
from ..plans.plan import Place
from ..reasons import Reason
from ..several_cards.copies import Cards
from .faults import TELLING
from .last_run import Coverage, PartCounts, Steps, parts, parts_of, together
from .pace import Pace
from .planner import Planner
from .root_copy import RootCopy
from .scope import Scope

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TIMING = "timing a step"


@dataclass
class SessionOptions:
    """What the user chose on the node."""

    when_missing: WhenMissing
    graphs: str
    folder_only: bool = False
    form: CallForm = CallForm.AUTO


class AttachedBy(NamedTuple):
    """Where in a prompt a session was attached.

    Attributes:
        made_of: identifies the node that attached it in another prompt.
        workflow: the prompt's, None where it has none.
        nodes: those that a user knows: this one, or those before which the server put it.
        by_setting: whether the server put it there.
        has_ended: tells whether that prompt has ended.
        is_left_out: tells whether a later prompt had that node, and made its images without it.
    """

    made_of: tuple[str, str]
    workflow: str | None
    nodes: tuple[str, ...]
    by_setting: bool = False
    has_ended: Callable[[], bool] = lambda: False
    is_left_out: Callable[[], bool] = lambda: False


#: Tells what of the running prompt a session is of, by what it was of; None is the node that runs.
Whose = Callable[[AttachedBy | None], AttachedBy | None]


@dataclass(eq=False)
class ModelCopy:
    """What serves a copy of the root module with weights of its own, mostly on another card.

    Attributes:
        scope: what it runs through.
        pace: how long its steps take.
        counts: what became of them in the last run, and in this one.
    """

    scope: Scope
    pace: Pace
    counts: Steps


class Session:
    """One compiled MODEL, VAE or CONTROL_NET."""

    def __init__(
        self,
        identifier: str,
        name: str,
        backend: Compiler,
        options: SessionOptions,
        scope: Scope,
        pace: Pace,
        notes: Iterable[Reason] = (),
        whose: Whose = lambda _: None,
    ) -> None:
        """Set up; the engine chose all but `identifier` and `name`.

        Args:
            identifier: an id for reports.
            name: a name for reports.
            backend: what turns its regions into graphs.
            options: what the user chose on the node.
            scope: what the root module runs through.
            pace: how long its steps take.
            notes: lines for the report.
            whose: tells where in the running prompt it belongs.
        """
        self.id = identifier
        self.name = name
        self.backend = backend
        self.options = options
        #: What the root module runs through.
        self.scope = scope
        self._copies: Live[Scope] = Live()
        #: Copies with weights of their own, on other cards.
        self.cards: Cards[ModelCopy] = Cards()
        self._belongings: dict[Hashable, Any] = {}
        self._notes = list(notes)
        self._eager_calls: Counter[Reason] = Counter()
        self._counting = threading.Lock()
        #: Keys of graphs that were looked for.
        self._asked: set[str] = set()
        #: Keys of graphs that were ready in this process before this session came.
        self._reused: set[str] = set()
        #: Whether the log has said that all requested graphs have come.
        self._is_told = True
        self._warned: set[str] = set()
        #: Graphs built for it that `take_counts` told of.
        self._counted: set[str] = set()
        #: How long its steps take; those of copies are other ones.
        self.pace = pace
        #: What became of its steps in the last run, and in this one.
        self.counts = Steps()
        #: Whose run goes on, as its owner tells runs apart; None between runs.
        self.running: Any = None
        self._whose = whose
        #: What attached it, in the last prompt that did or ran it; None where nothing tells.
        self.attached_by = self._look_at_nodes(None)
        #: Whether its user cancelled what it waited for: the run that follows does without.
        self.does_without = False
        #: Sessions whose models are evaluated within this one's run, and have none of their own.
        self.guests: list[Session] = []

    @property
    def lesson(self) -> LearnedModel | None:
        """What is known of its model, if no family describes it."""
        return self.scope.planner.lesson

    def begin_run(self) -> None:
        """It runs, perhaps in another prompt, to which the host's cache has served it."""
        self.counts.begin_run()
        if self.attached_by is not None:
            self.attached_by = self._look_at_nodes(self.attached_by) or self.attached_by

    def _look_at_nodes(self, before: AttachedBy | None) -> AttachedBy | None:
        return self.scope.faults.spare(TELLING, "noting its nodes", self._whose, before)

    @property
    def graphs(self) -> list[CompiledGraph]:
        """The graphs of all kinds that have one: what common sizes need."""
        return _once(self.scope.graphs, *(card.scope.graphs for card in self.cards))

    @property
    def all_graphs(self) -> list[CompiledGraph]:
        """Those, and the rare ones that are built after them."""
        scopes = [self.scope, *(card.scope for card in self.cards)]
        return _once(self.graphs, *(scope.second_graphs for scope in scopes))

    @property
    def scopes(self) -> list[Scope]:
        """The root module's scope, and those of its copies."""
        return [*self.beside(self.scope), *(card.scope for card in self.cards)]

    def beside(self, scope: Scope) -> list[Scope]:
        """Return a root module's scope, and those of copies made of the same blocks."""
        return [scope, *(self._copies.values() if scope is self.scope else ())]

    def scope_of(self, root: Any) -> Scope | None:
        """Return the scope of the root module or of a copy of it, None for any other module.

        A copy keeps its scopes itself, so they are freed with it.
        """
        if root is self.scope.root:
            return self.scope
        if (card := self.cards.of_root(root)) is not None:
            return card.scope
        if not isinstance(root, RootCopy) or root.of is not self.scope.root:
            return None
        scope = root.scopes.get(self.id)
        if scope is None or scope.root is not root.module:
            scope = self.scope.copy(root.module, self.scope.holder, Planner(plan_model))
            root.scopes[self.id] = scope
            self._copies.add(id(scope), scope)
        return scope

    def card(self, root: torch.nn.Module, holder: Any) -> ModelCopy:
        """Return what serves a copy of the root module with its own weights.

        Args:
            root: the copy.
            holder: the module on which the host notes where the copy's weights are.
        """
        first, pace = self.scope, self.pace
        return self.cards.take(
            root, holder, lambda: ModelCopy(first.copy(root, holder), pace.fresh(), Steps())
        )

    def keep(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return what is kept under a name for as long as this session; make it if needed.

        Another node's copies of the root module stay here with their scopes, so that their captured
        calls are still there when that node runs again.
        """
        if name not in self._belongings:
            self._belongings[name] = make()
        found: T = self._belongings[name]
        return found

    @property
    def is_unused(self) -> bool:
        """Whether the last prompt with its node ended, and no run of it began."""
        by, faults = self.attached_by, self.scope.faults
        if self.running is not None or by is None:
            return False
        if self.counts.last is None:
            return by.has_ended()
        return faults.spare(TELLING, "looking at later prompts", by.is_left_out) is True

    @property
    def came(self) -> bool:
        """Whether any step of this run came here."""
        return self.counts.came or any(card.counts.came for card in self.cards)

    def end_run(self) -> None:
        """Keep what the run that ended did."""
        scope = self.scope
        ran, placed = set(scope.ran_places), set(scope.placed)
        for copy in self._copies.values():  # in which the same modules have other names
            mine = {_module_of(place): place.name for place in scope.plan.places}
            theirs = {place.name: mine.get(_module_of(place)) for place in copy.plan.places}
            ran |= {name for each in copy.ran_places if (name := theirs.get(each))}
            placed |= {name for each in copy.placed if (name := theirs.get(each))}
        self.counts.end_run(frozenset(ran), frozenset(placed))
        for card in self.cards:
            card.counts.end_run(card.scope.ran_places, card.scope.placed)

    def parts(self) -> PartCounts:
        """Say how the root module's parts stand, on all cards that ran last."""
        cards = [card for card in self.cards if card.counts.took_part]
        found = [standing_of(card.scope, card.counts) for card in cards]
        if self.counts.took_part or not cards:
            found.insert(0, standing_of(self.scope, self.counts))
        return parts(*together(found))

    def describe(
        self, device: torch.device, dtype: torch.dtype, scope: Scope | None = None
    ) -> list[CompiledGraph]:
        """Describe the kinds for a device and compute dtype; returns their graphs.

        Args:
            scope: of a copy; None is the root module itself.
        """
        scope = scope or self.scope
        known = set() if scope is self.scope else {graph.key for graph in self.all_graphs}
        graphs = scope.describe(device, dtype)
        ready = self._ready()
        self._reused = self._reused | (ready - known) if known else ready
        return graphs

    def look_again(self) -> bool:
        """As `describe`, once more is known of a model that no family describes; from any thread.

        Returns:
            Whether it was described again.
        """
        is_done = self.scope.describe_again()
        if is_done:
            self._reused = self._ready()
        return is_done

    def _ready(self) -> set[str]:
        return {graph.key for graph in self.all_graphs if graph.state is State.READY}

    def expect(self, graphs: Iterable[CompiledGraph]) -> None:
        """Note that graphs are looked for; the log will say when they have come."""
        self._asked |= {graph.key for graph in graphs}
        self._is_told = False

    def is_new(self, graph: CompiledGraph) -> bool:
        """Whether a graph came to this process after this session did."""
        return graph.key not in self._reused

    def step(
        self,
        host: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        scope: Scope | None = None,
        not_ours: Reason | None = None,
        no_capture: Reason | None = None,
    ) -> Any:
        """Run one call of the root module through what graphs are ready.

        Args:
            host: the call as the host would make it, with these arguments.
            scope: of the copy that is called; None is the root module itself.
            not_ours: why this call does not belong to this session, if so.
            no_capture: another node's part within the call, if there is one: it is not captured.
        """
        scope = scope or self.scope
        activations = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        reason = not_ours or scope.why_not(next(activations, None))
        card, faults, begun = self.cards.of(scope), scope.faults, None
        counts, pace = (self.counts, self.pace) if card is None else (card.counts, card.pace)
        if reason is not None:
            self.leave(reason, counts)
            return host(*args, **kwargs)
        counts.serve(no_capture)
        if card is not None or scope is self.scope:
            begun = faults.spare(TELLING, _TIMING, pace.begin, args, kwargs)
        with self.cards.in_order(card, is_first=scope is self.scope):
            made = scope.call(host, args, kwargs, no_capture=no_capture)
        if begun is not None and made.how is not None:
            served = len(scope.forwards.now.installed)
            faults.spare(TELLING, _TIMING, pace.end, begun, made.how, served)
        return made.result

    def take_counts(self) -> tuple[int, int]:
        """Return how many graphs were built for it since the last call, and how many are missing
        now.
        """
        built = {g.key for g in self._new_graphs() if g.source == "built"} - self._counted
        self._counted |= built
        return len(built), sum(graph.state is not State.READY for graph in self.graphs)

    def finished_line(self) -> str | None:
        """Return a line for the log once all requested graphs have come or failed, else None."""
        graphs = self.graphs
        ready = sum(g.state is State.READY for g in graphs)
        if self._is_told or not ready or any(g.is_pending for g in graphs):
            return None
        self._is_told = True
        new = self._new_graphs()
        loaded = [g.loaded for g in new if g.loaded is not None]
        built = [each for each in loaded if each.source == "built"]
        seconds = sum(each.build_seconds or 0.0 for each in built)
        parts = [f"{len(built)} compiled in {seconds:.0f} s of work"] if built else []
        parts += [f"{len(new) - len(built)} loaded"] if len(new) > len(built) else []
        parts += [f"{ready - len(new)} in use before"] if ready > len(new) else []
        came = f"{self.name}: {ready} of {len(graphs)} compiled graphs are ready"
        return f"{came}: {', '.join(parts)} ({self.backend.name})"

    def _new_graphs(self) -> list[CompiledGraph]:
        """What came to this process after this session did."""
        return [g for g in self.graphs if g.state is State.READY and self.is_new(g)]

    def leave(self, reason: Reason, counts: Steps | None = None) -> None:
        """Note that a call of the root module runs as without us; `counts`: of the copy, if one."""
        self.count_eager(reason, counts)
        self._warn(reason)

    def miss(self, reason: Reason) -> None:
        """Note why no step of the ending run came here."""
        self.counts.leave(reason)
        self._warn(reason)

    def count_eager(self, reason: Reason, counts: Steps | None = None) -> None:
        """Count a call of the root module that ran as without us; `counts`: as of `leave`."""
        (counts or self.counts).leave(reason)
        with self._counting:  # a thread for each card
            self._eager_calls[reason] += 1

    @property
    def eager_calls(self) -> dict[Reason, int]:
        """Calls of the root module that ran as without us, by reason."""
        return dict(self._eager_calls)  # the prompt's thread counts on

    @property
    def notes(self) -> list[Reason]:
        """Lines for the report."""
        return list(self._notes)

    def note(self, text: Reason) -> None:
        """Keep a line for the report, once."""
        if text not in self._notes:
            self._notes.append(text)

    def warn_once(self) -> None:
        """Log each new reason for running eager, once in a session."""
        for _, reason in self.scope.eager_places():
            self._warn(reason)

    def _warn(self, reason: Reason) -> None:
        if reason in self._warned:
            return
        self._warned.add(reason)
        level = logging.DEBUG if reason.expected else logging.WARNING
        logger.log(level, "Warmgraph: parts of %s run at normal speed: %s", self.name, reason)


def _once(*lists: Iterable[CompiledGraph]) -> list[CompiledGraph]:
    """All graphs of some lists, each once: copies on the same card share theirs."""
    return list({id(graph): graph for graphs in lists for graph in graphs}.values())


def standing_of(scope: Scope, counts: Steps) -> Coverage:
    """Return how a root module stands that runs through a scope."""
    eager, last = scope.eager_places(), counts.last
    told = {name for name, _ in eager}
    ran, idle = (told, told) if last is None else (told | last.ran, last.placed)
    return Coverage(parts_of(scope.plan, ran, idle), eager, last)


def _module_of(place: Place) -> tuple[int, str]:
    """What a place has in common in a root module and its copies."""
    return id(place.module), place.form.name
