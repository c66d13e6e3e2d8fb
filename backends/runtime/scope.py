"""One root module that runs through graphs: its plan, its kinds, and what happens around each call.

While a call runs, the modules of ready places carry our `forward`; after it they are the host's
again, so another branch that shares the module never meets a graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ..contract import Backend, Description
from ..host import pause_host_compiler
from ..keys import target
from ..regions.plan import Dispatch, Place, Plan
from ..sources import Watch
from .anchors import Anchors
from .calls import Call, FixedCallError, arithmetic, read_call, unread_options
from .graphs import Graph, Graphs, State
from .kinds import Kind, describe_kinds
from .region import Region
from .replays import EXACT, Replays
from .specials import Either, Specials
from .verified import Verified
from .weights import ModelWeights, same_device
from .wiring import Wiring, patched_places, replaced_function


class _Form(NamedTuple):
    """What serves a call: forwards by module, and a name that is equal for equal ones."""

    installed: list[tuple[torch.nn.Module, Callable[..., Any]]]
    served: Hashable
    recorded: Callable[[], None] | None = None


class Target(NamedTuple):
    """Where a root module runs.

    Attributes:
        device: its load device.
        dtype: the dtype in which its operators compute.
        patches: the object patches that its patcher puts into it, by name.
    """

    device: torch.device
    dtype: torch.dtype
    patches: Mapping[str, Any]


class Scope:
    """One root module and the graphs of its regions."""

    def __init__(
        self,
        root: torch.nn.Module,
        holder: Any,
        make_plan: Callable[[], Plan | str],
        plan: Plan,
        backend: Backend,
        graphs: Graphs,
        verified: Verified,
        replays: Replays | None = None,
        specials: Specials | None = None,
    ) -> None:
        """Set up; nothing is described yet.

        Args:
            root: the module that is cut into regions.
            holder: the module on which the host's patcher notes where the weights are.
            make_plan: cuts `root` anew, for when its modules were replaced.
            plan: what it gave at first.
            replays: captures whole calls as CUDA graphs; None where none are wanted.
            specials: which calls get graphs of their own sizes; None where none do.
        """
        self.root = root
        self.plan = plan
        self.kinds: list[Kind] = []
        self._holder = holder
        self._make_plan = make_plan
        self._backend = backend
        self._graphs = graphs
        self._verified = verified
        self.replays = replays
        self._specials = specials
        self._unread = unread_options(root)
        self._sets: dict[Hashable, _Form] = {}
        self._special_regions: dict[tuple[str, str], Either] = {}
        self._anchors: Anchors | None = None
        self._foreign_code: str | None = None
        self._replaced: str | None = None
        self._form: Hashable = EXACT
        self._weights: ModelWeights | None = None
        self._regions: dict[str, Region] = {}
        self._past_calls = 0
        self._declined: dict[str, str] = {}
        self._installed: list[tuple[torch.nn.Module, Callable[..., Any]]] = []
        self._wiring = Wiring(root)
        self._marks: Any = None
        self._patches: dict[str, Any] = {}
        self._of_place: dict[str, Kind] = {}
        self._foreign: dict[str, str] = {}
        self._watch = Watch()
        self._version = -1
        self._facts: dict[str, Any] = {}
        self._dtype: torch.dtype | None = None
        self._lock = threading.RLock()
        self._inside = False
        self._run_open = False

    @property
    def graphs(self) -> list[Graph]:
        """The graphs of all kinds that have one."""
        return [kind.graph for kind in self.kinds if kind.graph is not None]

    @property
    def wide_graphs(self) -> list[Graph]:
        """The second graphs of kinds that have one."""
        return [kind.wide for kind in self.kinds if kind.wide is not None]

    @property
    def special_graphs(self) -> list[Graph]:
        """The graphs for the sizes of hot calls."""
        return [] if self._specials is None else self._specials.graphs

    def count_sizes(self, wanted: bool) -> None:
        """Say whether calls from now on count towards graphs of their own sizes."""
        if self._specials is not None:
            self._specials.counts = wanted

    @property
    def compiled_calls(self) -> int:
        """Calls of regions that graphs have served here."""
        replayed = 0 if self.replays is None else self.replays.regions
        return self._own_calls() + replayed

    def _own_calls(self) -> int:
        special = sum(either.special.calls for either in list(self._special_regions.values()))
        return self._past_calls + special + sum(r.calls for r in list(self._regions.values()))

    def variant(self, root: torch.nn.Module, make_plan: Callable[[], Plan | str]) -> Scope:
        """Return a scope over another root module made of the same blocks, with its own captured
        calls; its regions are of the same kinds, so nothing is built for it.
        """
        assert self._weights is not None and self._dtype is not None
        other = Scope(
            root,
            self._holder,
            make_plan,
            Plan(),
            self._backend,
            self._graphs,
            self._verified,
            None if self.replays is None else self.replays.fresh(),
            None if self._specials is None else self._specials.fresh(),
        )
        other.describe(self._weights.device, self._dtype)
        return other

    def over(self, root: torch.nn.Module, make_plan: Callable[[], Plan | str]) -> Scope:
        """Return a scope over another root module, which no patcher of the host looks after."""
        other = Scope(root, root, make_plan, Plan(), self._backend, self._graphs, self._verified)
        other._past_calls = self.compiled_calls
        return other

    def let_go(self) -> None:
        """Drop the root module and its weights, which the host is done with; reports stay."""
        with self._lock:
            self._past_calls = self._own_calls()
            self._declined = {n: r.declined for n, r in self._regions.items() if r.declined}
            gone = torch.nn.Module()
            for kind in self.kinds:
                kind.places = [replace(place, module=gone) for place in kind.places]
            self.plan = Plan(
                [
                    Dispatch(gone, tuple(replace(p, module=gone) for p in d.regions), _no_forward)
                    for d in self.plan.dispatches
                ],
                self.plan.outside,
                self.plan.symbols,
            )
            self.root, self._holder, self._make_plan = gone, gone, Plan
            self._forget_regions()
            self.drop_captured()
            self._weights, self._anchors = None, None
            self._wiring = Wiring(gone)
            self._marks, self._patches = None, {}
            self._run_open = False

    # --- what the model consists of -------------------------------------------------------------

    def describe(self, device: torch.device, dtype: torch.dtype) -> list[Graph]:
        """Write the model's kinds down for a device and compute dtype; returns their graphs."""
        self._facts = target(device.type, self._backend)
        plan = self._make_plan()
        if isinstance(plan, Plan):
            self.plan = plan
        self._wiring = Wiring(self.root)
        self._watch = Watch()
        if self.replays is not None:
            self._replaced = replaced_function(self.root, self._watch)
        self.kinds, self._of_place = describe_kinds(
            self.plan, device, dtype, self._watch, self._graph_of
        )
        self._dtype = dtype
        self._weights = ModelWeights(self._holder, device, dtype)
        self.drop_captured()
        self._anchors = Anchors(self.root, self._weights) if device.type == "cuda" else None
        self._past_calls = self._own_calls()
        self._forget_regions()
        if self._specials is not None:
            self._specials.clear()
        self._version = -1
        return self.graphs

    def _forget_regions(self) -> None:
        self._regions.clear()
        self._special_regions.clear()
        self._installed = []
        self._sets = {}

    def is_stale(self, target: Target) -> bool:
        """Tell whether the host's code, the modules or the compute dtype changed since `describe`.

        Must be asked once, at the start of a run: object patches count as a change only once.
        """
        before, self._patches = self._patches, dict(target.patches)
        repatched = self._patches.keys() != before.keys() or any(
            self._patches[name] is not before[name] for name in before
        )
        return (
            repatched
            or self._weights is None
            or target.device != self._weights.device
            or target.dtype is not self._dtype
            or self._watch.changed()
            or self._wiring.changed()
            or self._wiring.settings_changed()
        )

    # --- a run ------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Look at the model anew: what other nodes patched, and where its weights are now."""
        with self._lock:
            self._run_open = True
            if self._weights is not None:
                self._weights.begin_run()
            self._look()
            for region in self._regions.values():
                region.declined = None
            if self.replays is not None:
                self.replays.begin_run()
            if self._specials is not None:
                for key in self._specials.begin_run():
                    lost = self._specials.add(key, self._any_shape, self._graph_of)
                    if lost is not None:
                        self._let_set_go(*lost)

    def _let_set_go(self, key: Hashable, graphs: list[Graph]) -> None:
        """Keep nothing of graphs of one size that made room for another's."""
        if self.replays is not None:
            self.replays.drop_call(key)
        for graph in graphs:
            self._graphs.forget(graph)
        gone = {graph.key for graph in graphs}
        self._past_calls += sum(
            either.special.calls
            for name, either in self._special_regions.items()
            if name[1] in gone
        )
        self._special_regions = {
            name: either for name, either in self._special_regions.items() if name[1] not in gone
        }

    def _any_shape(self, name: str) -> Graph | None:
        kind = self._of_place.get(name)
        return None if kind is None else kind.graph

    def _graph_of(self, description: Description) -> Graph:
        return self._graphs.graph(description, self._backend, self._facts)

    def _look(self) -> None:
        """Find the places that other nodes patched."""
        self._marks = self._wiring.marks()
        self._foreign = dict(patched_places(self.plan))
        self._foreign_code = self._wiring.foreign() or self._replaced
        self._version = -1

    def end_run(self) -> None:
        """Forget what only the run needed."""
        with self._lock:
            self._run_open = False
            if self._weights is not None:
                self._weights.end_run()
            for region in self._regions.values():
                region.let_weights_go()
            for either in self._special_regions.values():
                either.special.let_weights_go()
            if self._anchors is not None:
                self._anchors.forget()

    def drop_captured(self) -> None:
        """Give the memory of captured calls back; they are captured anew when they come again."""
        if self.replays is not None:
            self.replays.drop()

    def call(
        self,
        host: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        foreign: str | None = None,
    ) -> Any:
        """Call the root module: by a captured call, or with the forwards of all ready places.

        Args:
            host: the call as the host would make it, with these arguments.
            foreign: another node's part in the call, which keeps it from being captured.
        """
        with self._lock:
            if not self._run_open:
                self.begin_run()
            assert self._weights is not None
            self._look_again()
            self._weights.begin_step()
            if self._version != self._graphs.version:
                self._install_ready()
            call = self._read(args, kwargs, foreign or self._foreign_code)
            if isinstance(call, str):
                if self.replays is not None:
                    self.replays.reasons[call] += 1
                return self._run(partial(host, *args, **kwargs), self._installed)
            complete = not any(graph.is_coming for graph in self.graphs)
            form = self._form_of(call.key, complete)
            if self.replays is None or self._anchors is None:
                result = self._run(partial(host, *args, **kwargs), form.installed)
            else:
                result = self.replays.call(
                    host,
                    call,
                    anchors=self._anchors,
                    form=form.served,
                    complete=complete,
                    runner=partial(self._run, installed=form.installed),
                )
            if form.recorded is not None:
                form.recorded()
            return result

    def _read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], foreign: str | None
    ) -> Call | str:
        """The call as data, or why it cannot be known by what it shows."""
        if foreign is not None:
            return foreign
        try:
            call = read_call(args, kwargs, self._unread)
            return call._replace(key=(call.key, arithmetic()))
        except FixedCallError as error:
            return str(error)

    def _form_of(self, key: Hashable, complete: bool) -> _Form:
        """What serves a call of this signature now."""
        form = _Form(self._installed, self._form)
        if self._specials is None or not complete:
            return form
        if self._specials.see(key) and self._installed:
            record, recorded = self._specials.record(key)
            return form._replace(installed=self._forwards(record).installed, recorded=recorded)
        return self._sets.get(key, form)

    def _run(
        self,
        run: Callable[[], Any],
        installed: Sequence[tuple[torch.nn.Module, Callable[..., Any]]],
        *,
        compiled: bool = True,
    ) -> Any:
        """Make one call with our forwards in place for as long as it runs."""
        self._inside = True
        placed = []
        try:
            for module, forward in installed if compiled else ():
                placed.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = forward
            with pause_host_compiler():
                return run()
        finally:
            for module, before in reversed(placed):
                if before is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = before
            self._inside = False

    def _look_again(self) -> None:
        """Notice what another node's wrapper changed around this very step."""
        assert self._weights is not None and self._dtype is not None
        if self._wiring.changed():
            self.describe(self._weights.device, self._dtype)
            self._look()
        elif self._wiring.marks() != self._marks:
            self._look()

    def why_not(self, x: Any) -> str | None:
        """Say why a whole call with the activation `x` is the host's, or None."""
        if self._weights is None:
            return "no graphs are asked for"
        if self._inside:
            return "the model calls itself"
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return "gradients are on (training)"
        if not isinstance(x, torch.Tensor) or not same_device(x.device, self._weights.device):
            return f"it runs on {getattr(x, 'device', 'an unknown device')}"
        return None

    def _install_ready(self) -> None:
        """Make the forwards of all modules whose graphs are ready."""
        self._version = self._graphs.version
        form = self._forwards(lambda _, region: region)
        self._installed, self._form = form.installed, form.served
        self._sets = {}
        if self._specials is not None:
            for key, graphs in self._specials.complete().items():
                self._sets[key] = self._forwards(partial(self._special, graphs))

    def _forwards(self, choose: Callable[[str, Region], Any]) -> _Form:
        """Make the forwards of all modules whose graphs are ready.

        Args:
            choose: what is called at a place, by its name and its any-shape region.
        """
        installed: list[tuple[torch.nn.Module, Callable[..., Any]]] = []
        served: list[tuple[str, int]] = []
        for dispatch in self.plan.dispatches:
            names = [place.name for place in dispatch.regions]
            if any(name in self._foreign for name in names):
                continue
            regions = [region for place in dispatch.regions if (region := self._region(place))]
            if len(regions) == len(names):
                calls = [choose(name, r) for name, r in zip(names, regions, strict=True)]
                installed += dispatch.forwards(calls)
                served += [(name, id(call)) for name, call in zip(names, calls, strict=True)]
        return _Form(installed, tuple(served) or EXACT)

    def _special(self, graphs: Mapping[str, Graph], name: str, region: Region) -> Any:
        """The call of a place by its special graph, where there is one."""
        graph = graphs.get(name)
        if graph is None:
            return region
        known = self._special_regions.get((name, graph.key))
        if known is None:
            special = Region(region.place, graph, region.source, self._verified)
            known = self._special_regions[name, graph.key] = Either(special, region)
        return known

    def _region(self, place: Place) -> Region | None:
        graph = self._of_place[place.name].graph
        if graph is None or graph.state is not State.READY:
            return None
        region = self._regions.get(place.name)
        if region is None:
            assert self._weights is not None
            region = Region(place, graph, self._weights, self._verified)
            self._regions[place.name] = region
        wide = self._of_place[place.name].wide
        if region.wide is None and wide is not None and wide.state is State.READY:
            region.wide = Region(place, wide, region.source, self._verified)
        return region

    # --- what to say ------------------------------------------------------------------------------

    def eager_places(self) -> list[tuple[str, str]]:
        """Return (place, reason) of everything that runs the host's code now."""
        found = list(self.plan.outside)
        for dispatch in self.plan.dispatches:
            reasons = [self._reason(place) for place in dispatch.regions]
            shared = next((r for r in reasons if r is not None), None)
            if shared is not None:
                found += [(place.name, shared) for place in dispatch.regions]
        return found

    def _reason(self, place: Place) -> str | None:
        if place.name in self._foreign:
            return self._foreign[place.name]
        kind = self._of_place.get(place.name)
        if kind is None or kind.graph is None:
            return kind.reason if kind is not None and kind.reason else "it was not described"
        graph = kind.graph
        if graph.state is State.READY:
            region = self._regions.get(place.name)
            return region.declined if region is not None else self._declined.get(place.name)
        if graph.state is State.BUILDING:
            return "its graph is being built"
        if graph.state is State.LOADING:
            return "its graph is being loaded"
        text = graph.reason or "no saved graph"
        return f"{text}; {graph.remedy}" if graph.remedy else text


def _no_forward(*_: Any) -> Any:
    """The forward of a place whose module is gone."""
    raise RuntimeError("a scope must not run once it was let go")
