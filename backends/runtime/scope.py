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

from ..building.claims import BY_ANOTHER_SERVER
from ..contract import Backend, Description
from ..cuda_graphs.replays import Replays
from ..cuda_graphs.signatures import Call, FixedCallError, arithmetic, read_call
from ..families.plan import Dispatch, Place, Plan
from ..host_api.execution import pause_host_compiler
from ..host_api.options import unread_options
from ..kinds.keys import target
from ..kinds.packs import foreign_class
from ..storing.comparisons import Verified
from ..weights.addresses import Anchors
from ..weights.casting import same_device
from ..weights.fetching import ModelWeights
from .faults import CAPTURES, STEP, Faults
from .foreign import Foreign
from .forwards import Forwards, ForwardSet
from .graph import Graph, State
from .graphs import Graphs
from .kind import Kind, describe_kinds
from .specials import Specials


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


#: A module and the forward that it gets.
Placed = tuple[torch.nn.Module, Callable[..., Any]]


class _Step(NamedTuple):
    """How one call is to be made: through what, and as which data, if it is known by that."""

    serving: ForwardSet
    call: Call | None
    complete: bool


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
        *,
        quick_dynamic: bool = True,
    ) -> None:
        """Set up; nothing is described yet.

        Args:
            root: the module that is cut into regions.
            holder: the module on which the host's patcher notes where the weights are.
            make_plan: cuts `root` anew, for when its modules were replaced.
            plan: what it gave at first.
            replays: captures whole calls as CUDA graphs; None where none are wanted.
            specials: which calls get graphs of their own sizes; None where none do.
            quick_dynamic: of `ModelWeights`.
        """
        self.root = root
        self.plan = plan
        self.kinds: list[Kind] = []
        self._holder = holder
        self._quick_dynamic = quick_dynamic
        self._make_plan = make_plan
        self._backend = backend
        self._graphs = graphs
        self._verified = verified
        self.replays = replays
        self.faults = Faults()
        self.forwards = Forwards(graphs, verified, specials or Specials(lambda: None), self.faults)
        self._unread = unread_options(root)
        self._anchors: Anchors | None = None
        self._weights: ModelWeights | None = None
        self._foreign = Foreign(root, plan, (), whole_calls=False)
        self._patches: dict[str, Any] = {}
        self._of_place: dict[str, Kind] = {}
        self._facts: dict[str, Any] = {}
        self._dtype: torch.dtype | None = None
        self._lock = threading.RLock()
        self._placed: list[tuple[torch.nn.Module, Any]] = []
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
            quick_dynamic=self._quick_dynamic,
        )
        other.describe(self._weights.device, self._dtype)
        return other

    def over(self, root: torch.nn.Module, make_plan: Callable[[], Plan | str]) -> Scope:
        """Return a scope over another root module, which no patcher of the host looks after."""
        quick, parts = self._quick_dynamic, (self._backend, self._graphs, self._verified)
        other = Scope(root, root, make_plan, Plan(), *parts, quick_dynamic=quick)
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
            self._foreign = Foreign(gone, self.plan, (), whole_calls=False)
            self._patches = {}
            self._run_open = False

    # --- what the model consists of -------------------------------------------------------------

    def describe(self, device: torch.device, dtype: torch.dtype) -> list[Graph]:
        """Write the model's kinds down for a device and compute dtype; returns their graphs."""
        self._facts = target(device.type, self._backend)
        plan = self._make_plan()
        self.plan = plan if isinstance(plan, Plan) else Plan(outside=[("the model", plan)])
        self.kinds, self._of_place = describe_kinds(self.plan, device, dtype, self._graph_of)
        self._foreign = Foreign(
            self.root, self.plan, self.kinds, whole_calls=self.replays is not None
        )
        self._dtype = dtype
        quick = self._quick_dynamic
        self._weights = ModelWeights(self._holder, device, dtype, quick_dynamic=quick)
        self.drop_captured()
        self._anchors = Anchors(self.root, self._weights) if device.type == "cuda" else None
        self.forwards.bind(self.plan, self._of_place, self._weights)
        self.faults.clear()
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
            or self._foreign.is_stale()
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
        """Find what other nodes do now, and leave it to them."""
        self._foreign.look()
        self.forwards.leave(self._foreign.places.keys())

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

    def unloaded(self) -> None:
        """The host took the model off its device: nothing is held for it any more."""
        self.faults.clear()
        self.faults.spare(CAPTURES, "giving captured calls back", self.drop_captured)

    def call(
        self,
        host: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        foreign: str | None = None,
    ) -> Any:
        """Call the root module: by a captured call, or with the forwards of all ready places.

        What the host's own code raises passes through, and it runs once; what ours raises leaves
        the call to the host.

        Args:
            host: the call as the host would make it, with these arguments.
            foreign: another node's part in the call, which keeps it from being captured.
        """
        with self._lock:
            plain = partial(host, *args, **kwargs)
            step = self.faults.spare(STEP, "preparing a step", self._prepare, args, kwargs, foreign)
            if step is None:
                return self._run(plain, ())
            if step.call is None or self.replays is None or self._anchors is None:
                result = self._run(plain, step.serving.installed)
            else:
                result = self._replayed(host, plain, step, step.call)
            if step.serving.recorded is not None:
                self.faults.spare(STEP, "recording sizes", step.serving.recorded)
            return result

    def _prepare(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], foreign: str | None
    ) -> _Step:
        """Find out how a call is to be made."""
        if not self._run_open:
            self.begin_run()
        assert self._weights is not None
        self._look_again()
        self._weights.begin_step()
        self.forwards.refresh()
        call = self._read(args, kwargs, foreign or self._foreign.code)
        if isinstance(call, str):
            if self.replays is not None:
                self.replays.reasons[call] += 1
            return _Step(self.forwards.any_shape, None, complete=True)
        complete = not any(graph.is_coming for graph in self.graphs)
        return _Step(self.forwards.of(call.key, complete=complete), call, complete=complete)

    def _replayed(
        self, host: Callable[..., Any], plain: Callable[[], Any], step: _Step, call: Call
    ) -> Any:
        """Make a call by replay where it can be, else through the forwards; and note how it was."""
        assert self.replays is not None and self._anchors is not None
        runner = partial(self._run, installed=step.serving.installed)
        attempt = None
        if self.faults.of(CAPTURES) is None:
            attempt = self.faults.spare(
                CAPTURES,
                "replaying a step",
                self.replays.attempt,
                host,
                call,
                anchors=self._anchors,
                form=step.serving.served,
                others=self.forwards.any_shape.served,
                complete=step.complete,
                runner=runner,
            )
        if attempt is None:
            return runner(plain)
        if attempt.result is not None:
            return attempt.result
        result = runner(plain, compiled=attempt.compiled)
        self.faults.spare(
            CAPTURES, "watching a step", self.replays.settle, attempt, self._anchors, result
        )
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
        self, run: Callable[[], Any], installed: Sequence[Placed], *, compiled: bool = True
    ) -> Any:
        """Make one call with our forwards in place for as long as it runs."""
        self._inside = True
        try:
            if compiled:
                self._place(installed)
            with pause_host_compiler():
                return run()
        finally:
            self._take_away()
            self._inside = False

    def _place(self, installed: Sequence[Placed]) -> None:
        for module, forward in installed:
            self._placed.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = forward

    def _take_away(self) -> None:
        while self._placed:
            module, before = self._placed.pop()
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before

    def innermost(self, host: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make the host's own call within other nodes' wrappers, which may have replaced code since
        the step began; what they replaced is theirs.
        """
        if self._placed and self._foreign.replaced_code():
            self.faults.spare(STEP, "looking within a step", self._withdraw)
        return host(*args, **kwargs)

    def _withdraw(self) -> None:
        self._take_away()
        self._look()
        self.forwards.refresh()
        self._place(self.forwards.any_shape.installed)

    def _look_again(self) -> None:
        """Notice what another node's wrapper changed around this very step."""
        assert self._weights is not None and self._dtype is not None
        if self._foreign.is_rebuilt():
            self.describe(self._weights.device, self._dtype)
            self._look()
        elif self._foreign.look_again():
            self.forwards.leave(self._foreign.places.keys())

    def why_not(self, x: Any) -> str | None:
        """Say why a whole call with the activation `x` is the host's, or None."""
        if (fault := self.faults.of(STEP)) is not None:
            return fault
        if self._weights is None:
            return "no graphs are asked for"
        if self._inside:
            return "the model calls itself"
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return "gradients are on (training)"
        if not isinstance(x, torch.Tensor) or not same_device(x.device, self._weights.device):
            return f"it runs on {getattr(x, 'device', 'an unknown device')}"
        return foreign_class(type(self.root))

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
        if (left := self._foreign.places.get(place.name)) is not None:
            return left
        kind = self._of_place.get(place.name)
        if kind is None or kind.graph is None:
            return kind.reason if kind is not None and kind.reason else "it was not described"
        graph = kind.graph
        if graph.state is State.READY:
            return self.forwards.declined(place.name)
        if graph.state is State.BUILDING:
            return BY_ANOTHER_SERVER if graph.built_elsewhere else "its graph is being built"
        if graph.state is State.LOADING:
            return "its graph is being loaded"
        text = graph.reason or "no saved graph"
        return f"{text}; {graph.remedy}" if graph.remedy else text


def _no_forward(*_: Any) -> Any:
    """The forward of a place whose module is gone."""
    raise RuntimeError("a scope must not run once it was let go")
