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
from .casting import same_device
from .forwards import Forwards
from .graphs import Graph, Graphs, State
from .kinds import Kind, describe_kinds
from .replays import Replays
from .specials import Specials
from .verified import Verified
from .weights import ModelWeights
from .wiring import Wiring, patched_places, replaced_function


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
        self.forwards = Forwards(graphs, verified, specials or Specials(lambda: None))
        self._unread = unread_options(root)
        self._anchors: Anchors | None = None
        self._foreign_code: str | None = None
        self._replaced: str | None = None
        self._weights: ModelWeights | None = None
        self._wiring = Wiring(root)
        self._marks: Any = None
        self._patches: dict[str, Any] = {}
        self._of_place: dict[str, Kind] = {}
        self._foreign: dict[str, str] = {}
        self._watch = Watch()
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
        return self.forwards.specials.graphs

    def count_sizes(self, wanted: bool) -> None:
        """Say whether calls from now on count towards graphs of their own sizes."""
        self.forwards.specials.counts = wanted

    @property
    def compiled_calls(self) -> int:
        """Calls of regions that graphs have served here."""
        return self.forwards.calls + (0 if self.replays is None else self.replays.regions)

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
            self.forwards.specials.fresh(),
        )
        other.describe(self._weights.device, self._dtype)
        return other

    def over(self, root: torch.nn.Module, make_plan: Callable[[], Plan | str]) -> Scope:
        """Return a scope over another root module, which no patcher of the host looks after."""
        other = Scope(root, root, make_plan, Plan(), self._backend, self._graphs, self._verified)
        other.forwards.past_calls = self.compiled_calls
        return other

    def let_go(self) -> None:
        """Drop the root module and its weights, which the host is done with; reports stay."""
        with self._lock:
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
                self.plan.guests,
            )
            self.root, self._holder, self._make_plan = gone, gone, Plan
            self.forwards.let_go()
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
        self.forwards.bind(self.plan, self._of_place, self._weights)
        return self.graphs

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
            if self.replays is not None:
                self.replays.begin_run()
            self.forwards.begin_run(self._graph_of, self._drop_call)

    def _drop_call(self, key: Hashable) -> None:
        if self.replays is not None:
            self.replays.drop_call(key)

    def _graph_of(self, description: Description) -> Graph:
        return self._graphs.graph(description, self._backend, self._facts)

    def _look(self) -> None:
        """Find the places that other nodes patched."""
        self._marks = self._wiring.marks()
        self._foreign = dict(patched_places(self.plan))
        self._foreign_code = self._wiring.foreign() or self._replaced
        self.forwards.leave(self._foreign.keys())

    def end_run(self) -> None:
        """Forget what only the run needed."""
        with self._lock:
            self._run_open = False
            if self._weights is not None:
                self._weights.end_run()
            self.forwards.end_run()
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
            self.forwards.refresh()
            call = self._read(args, kwargs, foreign or self._foreign_code)
            if isinstance(call, str):
                if self.replays is not None:
                    self.replays.reasons[call] += 1
                return self._run(partial(host, *args, **kwargs), self.forwards.any_shape.installed)
            complete = not any(graph.is_coming for graph in self.graphs)
            serving = self.forwards.of(call.key, complete=complete)
            if self.replays is None or self._anchors is None:
                result = self._run(partial(host, *args, **kwargs), serving.installed)
            else:
                result = self.replays.call(
                    host,
                    call,
                    anchors=self._anchors,
                    form=serving.served,
                    complete=complete,
                    runner=partial(self._run, installed=serving.installed),
                )
            if serving.recorded is not None:
                serving.recorded()
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
            return self.forwards.declined(place.name)
        if graph.state is State.BUILDING:
            return "its graph is being built"
        if graph.state is State.LOADING:
            return "its graph is being loaded"
        text = graph.reason or "no saved graph"
        return f"{text}; {graph.remedy}" if graph.remedy else text


def _no_forward(*_: Any) -> Any:
    """The forward of a place whose module is gone."""
    raise RuntimeError("a scope must not run once it was let go")
