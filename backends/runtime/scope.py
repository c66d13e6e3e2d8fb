"""One root module that runs through graphs: its plan, its kinds, and its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..choices.choices import Choices
from ..code.mentioned import MENTIONED
from ..code.packs import foreign_class
from ..contract import Compiler, RegionSpec
from ..cuda_graphs.captured_call import foreign_capture
from ..cuda_graphs.pieces import Pieces
from ..cuda_graphs.replays import Replays
from ..cuda_graphs.signatures import (
    CallValues,
    CaptureError,
    arithmetic,
    read_call,
    run_steps,
)
from ..device.gpu import index
from ..families.catalogue import unread_options
from ..graphs.compiled_graph import CompiledGraph, State
from ..host_api import options
from ..host_api.execution import pause_host_compiler
from ..host_api.needs import Feature
from ..kinds.layout import elements_of
from ..plans.plan import Place, Placed, Plan
from ..reasons import Reason, of
from ..target.keys import target
from ..weights.source import same_device
from .aids import aids_of
from .bound import Bound, Placement
from .dispatcher import NOTHING_SERVES, Dispatcher
from .faults import CAPTURES, LEARNING, STEP, Faults
from .kind import Kind, describe_kinds, hand_over
from .making import MadeCall, Making, Step
from .pace import EAGER
from .placing import Placing
from .planner import Planner, RootCall
from .shared import Shared
from .specializations import CallStats
from .wiring import ForeignCode
from .within import Within

#: A graph's states before it is known to come.
_SOUGHT = (State.MISSING, State.LOADING)


class Scope:
    """One root module and the graphs of its regions."""

    def __init__(
        self,
        root: torch.nn.Module,
        holder: Any,
        planner: Planner,
        plan: Plan,
        backend: Compiler,
        shared: Shared,
        replays: Replays | None = None,
        pieces: Pieces | None = None,
        *,
        account: CallStats | None = None,
    ) -> None:
        """Set up; nothing is described yet.

        Args:
            root: the module that is cut into regions.
            holder: the module on which the host's patcher notes where the weights are; it is kept
                as `holder`.
            planner: cuts the root module, again when its modules were replaced.
            plan: its first result.
            shared: what all scopes of the process use.
            replays: captures whole calls as CUDA graphs; None: none are wanted.
            pieces: captures places where a whole call is not; None likewise.
            account: of a previous scope, which continues; None: a new one.
        """
        self.root = root
        self.plan = plan
        self.kinds: list[Kind] = []
        self.holder = holder
        self.planner = planner
        self._backend = backend
        self._shared = shared
        self.replays = replays
        self.pieces = pieces
        self.faults = Faults()
        #: What the regions note of their calls.
        self.account = account or CallStats(shared.needs_of(holder), shared.verdicts_of(holder))
        self.forwards = Dispatcher(shared, self.faults, self.account, pieces)
        self._unread = unread_options(root)
        self._bound: Bound | None = None
        self._patches: dict[str, Any] = {}
        self._of_place: dict[str, Kind] = {}
        #: Kinds for places where another node replaced a part, and what it put there.
        self._called: dict[str, tuple[Kind, ForeignCode]] = {}
        self._facts: dict[str, Any] = {}
        self._card = 0
        self._lock = threading.RLock()
        self._placing = Placing()
        self._making = Making(self._placing, self.forwards, self.faults, self.account)
        self._within = Within(self._placing, self.faults, self._renewed)
        self._run_open = False

    @property
    def graphs(self) -> list[CompiledGraph]:
        """The graphs of all kinds that have one."""
        return [kind.graph for kind in self.kinds if kind.graph is not None]

    @property
    def second_graphs(self) -> list[CompiledGraph]:
        """The graphs of kinds for calls that their first ones cannot serve."""
        return [graph for kind in self.kinds for graph in kind.second_graphs]

    @property
    def serving(self) -> list[Kind]:
        """All kinds, and those for places with others' code now."""
        called = (each for kind in self.kinds for each in kind.called.values())
        return [*self.kinds, *(kind for kind in called if kind.places)]

    @property
    def compiled_calls(self) -> int:
        """Calls of regions that graphs have served here."""
        return self.account.calls + (0 if self.replays is None else self.replays.regions)

    @property
    def choices(self) -> Choices:
        """What chooses the kernels of its graphs' operators."""
        return self._shared.choices

    @property
    def device(self) -> torch.device | None:
        """The placement it was described for; None before, and once it was released."""
        return None if self._bound is None else self._bound.device

    @property
    def ran_places(self) -> frozenset[str]:
        """The places that graphs have served in this run, replayed ones among them."""
        return self.forwards.ran().union(() if self.replays is None else self.replays.places)

    @property
    def placed(self) -> frozenset[str]:
        """The places whose graphs the last step could call, but for those that were compared."""
        return self.forwards.placed

    def copy(
        self,
        root: torch.nn.Module,
        holder: Any,
        planner: Planner | None = None,
        *,
        for_one_run: bool = False,
    ) -> Scope:
        """Return a scope over another root module of the same kinds. The two share what their calls
        needed; with the same holder, it is described as this one is.

        Args:
            root, holder: of the copy.
            planner: cuts it; None: as this one's root module is cut.
            for_one_run: nothing of it is captured, and its calls count as this one's.
        """
        replays, pieces = (None, None) if for_one_run else (self.replays, self.pieces)
        if for_one_run:
            self.account.verdicts.compare_anew()
        other = Scope(
            root,
            holder,
            planner or self.planner.elsewhere(root, holder),
            Plan(),
            self._backend,
            self._shared,
            replays and replays.fresh(),
            pieces and pieces.fresh(),
            account=self.account
            if for_one_run
            else CallStats(self.account.needs, self._shared.verdicts_of(holder)),
        )
        if holder is self.holder and self._bound is not None:
            other.describe(self._bound.device, self._bound.dtype)
        return other

    def let_go(self) -> None:
        """Drop the root module and its weights, which the host no longer uses; reports stay."""
        with self._lock:
            for kind in self.serving:
                kind.let_go()
            gone = torch.nn.Module()
            self.plan = self.plan.over(gone)
            self.root = self.holder = gone
            self.forwards.let_go()
            self._within.forget()
            self.drop_captured()
            self.planner.let_go()
            self._bound = None
            self._patches = {}
            self._run_open = False

    # --- what the model consists of -------------------------------------------------------------

    def describe(self, device: torch.device, dtype: torch.dtype) -> list[CompiledGraph]:
        """Describe the model's kinds for a device and compute dtype; returns their graphs."""
        with self._lock:
            self._bind(device, dtype)
            return self.graphs

    def describe_again(self) -> bool:
        """Describe them again once more is known of the model, from any thread; not in a run.

        Returns:
            Whether that is done.
        """
        with self._lock:
            if self._run_open or self._bound is None or not self.planner.has_news:
                return False
            self._bind(self._bound.device, self._bound.dtype)
            return True

    def _bind(self, device: torch.device, dtype: torch.dtype) -> Bound:
        self._card = index(device)
        self._facts = target(device.type, self._backend, self._card)
        plan = self.planner.plan(self.root)
        self.plan = plan if isinstance(plan, Plan) else Plan(outside=[("the model", plan)])
        self.kinds, self._of_place = describe_kinds(
            self.plan,
            device,
            dtype,
            self._graph_of,
            self.account.needs,
            self._shared.debugging.why_not,
        )
        aids = aids_of(
            self.kinds,
            device,
            dtype,
            self._graph_of,
            self._shared.choices,
            self._shared.debugging.why_not,
        )
        self._bound = Bound(
            self.root,
            self.holder,
            self.plan,
            self.kinds,
            device,
            dtype,
            whole_calls=self.replays is not None,
            together=Feature.WEIGHTS_TOGETHER not in self._shared.off,
            weights_ahead=Feature.WEIGHTS_AHEAD not in self._shared.off,
        )
        self._called = {}
        self.drop_captured()
        self.forwards.bind(self.plan, self._of_place, self._bound.weights, aids)
        self.kinds = [*self.kinds, *aids]
        self.faults.clear()
        return self._bound

    def is_stale(self, placement: Placement) -> bool:
        """Tell whether the host's code, the modules or the compute dtype changed since `describe`.

        Must be asked once, at the start of a run: object patches count as a change only once.
        """
        before, self._patches = self._patches, dict(placement.patches)
        repatched = self._patches.keys() != before.keys() or any(
            self._patches[name] is not before[name] for name in before
        )
        bound = self._bound
        is_other = bound is None or not bound.is_for(placement.device, placement.dtype)
        return repatched or self.planner.has_news or is_other

    # --- a run ------------------------------------------------------------------------------------

    def begin_run(self, *, within: bool = False) -> None:
        """Inspect the model again: what other nodes patched, and where its weights are now;
        `within` one of the host's runs, resting graphs stay so.
        """
        with self._lock:
            self._run_open = True
            self.account.lookahead.begin_run()
            if not within:
                self.account.verdicts.begin_run(self.holder, self.graphs)
            if self._bound is not None:
                self._bound.begin_run()
                self._leave_to_others(self._bound)
            if self.replays is not None:
                self.replays.begin_run()
            if self.pieces is not None:
                self.pieces.begin_run()
            self._add_needed()
            self.forwards.begin_run()
            self.planner.begin_run()

    def _add_needed(self) -> None:
        for kind in self.kinds:
            kind.add_variants(self.account.needs, self._graph_of)

    def _graph_of(self, description: RegionSpec) -> CompiledGraph:
        return self._shared.graphs.graph(description, self._backend, self._facts, self._card)

    def _leave_to_others(self, bound: Bound) -> None:
        """Leave to other nodes what they have changed: whole places, or parts that graphs call."""
        foreign = bound.foreign
        self._within.forget()
        self._called = hand_over(
            self._of_place, foreign.guests, foreign.places, self.kinds, self._graph_of
        )
        self.forwards.leave(foreign.places.keys(), self._called)

    def end_run(self) -> None:
        """Forget what only the run needed."""
        with self._lock:
            self._run_open = False
            self.account.lookahead.end_run()
            if self._bound is not None:
                self._bound.end_run()
            self.forwards.end_run()
            self._within.forget()
            if self.replays is not None:
                self.replays.end_run()
            if self.pieces is not None:
                self.pieces.end_run()
            self._add_needed()

    def drop_captured(self) -> None:
        """Free the memory of captured calls; they are captured again when they repeat."""
        if self.replays is not None:
            self.replays.drop()
        if self.pieces is not None:
            self.pieces.drop()

    def give_back(self) -> None:
        """As `drop_captured`, from any thread: a running step ends first."""
        with self._lock:
            self.drop_captured()

    def unloaded(self) -> None:
        """The host unloaded the model from its device: nothing is held for it any more."""
        self.faults.clear()
        self.faults.spare(CAPTURES, "giving captured calls back", self.drop_captured)

    def call(
        self,
        host: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        no_capture: Reason | None = None,
    ) -> MadeCall:
        """Call the root module: by a captured call, or with the forwards of all ready places.

        Exceptions of the host's own code pass through, and it runs once; ours leave the call to the
        host.

        Args:
            host: the call as the host would make it, with these arguments.
            no_capture: why it is not to be captured (another node's part in it), if so.
        """
        with self._lock, pause_host_compiler():
            step = self.faults.spare(
                STEP, "preparing a step", self._prepare, args, kwargs, no_capture
            )
            if step is None:
                return MadeCall(self._placing.run(partial(host, *args, **kwargs), ()), EAGER)

            def plain() -> Any:
                values = (*args, *kwargs.values())
                with self.forwards.asking_ahead(step.serving, values), step.watch:
                    return host(*args, **kwargs)  # not where a replay gives the result

            made = self._making.make(self.root, host, plain, step)
            self.faults.spare(LEARNING, "looking at a step", self.planner.end_call, made.declined)
            return made

    def _prepare(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], no_capture: Reason | None
    ) -> Step:
        """Decide how a call is to be made."""
        if not self._run_open:
            self.begin_run(within=True)
        bound = self._look_again()
        self.account.lookahead.begin_step(*elements_of((*args, *kwargs.values())))
        bound.weights.begin_step()
        self.forwards.refresh()
        values = (*args, *kwargs.values())
        is_led = no_capture is not None or bound.foreign.is_led or options.have_functions(values)
        now = self.forwards.now
        now = now._replace(installed=self._within.begin_step(now.installed, is_led=is_led))
        step = Step(now, pieces=self.pieces, steps=run_steps(args, kwargs))
        call = self._read(args, kwargs, no_capture or bound.foreign.code)
        others = call if isinstance(call, Reason) else None
        watch = self.planner.begin_call(RootCall(args, kwargs, others, bound.dtype), self.faults)
        self.account.structure = self.planner.structure
        if watch is not None:
            return Step(NOTHING_SERVES, watch=watch)
        if isinstance(call, Reason):
            if self.replays is not None:
                self.replays.decline(call)
            return step
        complete = not any(
            kind.graph.is_coming for kind in self.kinds if kind.places and kind.graph is not None
        )
        return step._replace(call=call, replays=self.replays, book=bound.book, complete=complete)

    def _read(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        no_capture: Reason | None,
    ) -> CallValues | Reason:
        """The call as data, or why it is not to be captured or not identified by its arguments."""
        if no_capture is not None:
            return no_capture
        try:
            names = options.names_of((*args, *kwargs.values())) - self._unread
            unread = self._unread | MENTIONED.none_of(names)
            call = read_call(args, kwargs, unread)
            return call._replace(key=(call.key, arithmetic()))
        except CaptureError as error:
            return error.reason

    def innermost(self, host: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make the host's own call within other nodes' wrappers, which may have replaced code since
        the step began.
        """
        self._within.look()
        return host(*args, **kwargs)

    def _renewed(self) -> list[Placed] | None:
        """Our forwards for the model as others changed it within a step; None: unchanged."""
        if self._bound is None or not self._bound.foreign.look_again():
            return None
        self._leave_to_others(self._bound)
        self.forwards.refresh()
        return self.forwards.now.installed

    def _look_again(self) -> Bound:
        """Notice what another node's wrapper changed around this very step."""
        bound = self._bound
        assert bound is not None
        if bound.foreign.is_rebuilt():
            bound = self._bind(bound.device, bound.dtype)
            bound.foreign.look()
            self._leave_to_others(bound)
        elif bound.foreign.look_again():
            self._leave_to_others(bound)
        return bound

    def why_not(self, x: Any) -> Reason | None:
        """Say why the host makes a whole call with the activation `x`, or None."""
        if (fault := self.faults.of(STEP)) is not None:
            return fault
        if self._bound is None:
            return of("nothing_asked")
        if self._placing.is_open:
            return of("calls_itself")
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return of("gradients")
        if not isinstance(x, torch.Tensor) or not same_device(x.device, self._bound.device):
            return of("runs_on", device=getattr(x, "device", "an unknown device"))
        if (capture := foreign_capture(self._bound.device)) is not None:
            return capture
        return foreign_class(type(self.root))

    # --- what to say ------------------------------------------------------------------------------

    def eager_places(self) -> list[tuple[str, Reason]]:
        """Return (place, reason) of everything that runs the host's code now."""
        now = self.planner.why_none
        found = list(self.plan.outside) if now is None else [("the model", now)]
        for dispatch in self.plan.dispatches:
            reasons = [self._reason(place) for place in dispatch.regions]
            if not dispatch.apart:
                shared = next((r for r in reasons if r is not None), None)
                reasons = [shared for _ in reasons]
            pairs = zip(dispatch.regions, reasons, strict=True)
            found += [(place.name, why) for place, why in pairs if why is not None]
        return found

    def _reason(self, place: Place) -> Reason | None:
        left = None if self._bound is None else self._bound.foreign.places.get(place.name)
        if (left := left or self.planner.left) is not None:
            return left
        kind, guests = self._called.get(place.name, (self._of_place.get(place.name), None))
        if kind is None or kind.graph is None:
            return kind.reason if kind is not None and kind.reason else of("not_described")
        graph = kind.graph
        if guests is not None and graph.state in _SOUGHT and not graph.is_coming:
            return guests.why  # it may never come
        return graph.why_not or self.forwards.declined(place.name)
