"""One place of a model bound to a graph: checks, weights, the call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from ..choices.choices import HOSTS, Choices
from ..cuda_graphs.captured_call import foreign_capture, is_ours
from ..cuda_graphs.piece import GraphCall
from ..cuda_graphs.pieces import Pieces, PlaceCall
from ..graphs.compiled_graph import CompiledGraph
from ..host_api import formats
from ..host_api.attention import in_eight_bits
from ..host_api.execution import check_cancelled, is_interrupt, passes, pause_host_compiler
from ..host_api.options import ATTENTION
from ..kinds.layout import InputForm, form_of
from ..kinds.tolerance import Outcome
from ..operators import host_attention, host_layer, live_arguments
from ..operators.call_context import CallContext, now, options_of_step, using
from ..operators.recorded import RecordedCall
from ..plans.plan import Place
from ..reasons import Reason, of
from ..torch_api import surroundings
from ..weights.fetching import Fetched, ModelWeights, RegionWeights
from .beside import ByHost, Inputs, laid, laid_otherwise, order_of
from .faults import Faults
from .input_guard import InputGuard
from .specializations import GIVEN, UNROUNDED, CallStats, GuardFailure
from .verification import Verification
from .verifier import Sample, Verifier
from .wiring import BROUGHT, ForeignCode, with_given
from .written import leave

logger = logging.getLogger(__name__)


class Region:
    """Computes one place by its graph: `region(*inputs)` returns what the form's reference would,
    or None if the host is to do it.

    A call that its graph does not accept goes to the first of the place's other regions whose graph
    does; if there is none, what it needed is noted. Why a call was declined is in `declined`. A
    graph that fails or differs from eager is dropped for good, with its reason kept on the graph.
    Any other failure of our code leaves this kind to the host from then on (`faults`).
    """

    def __init__(
        self,
        place: Place,
        graph: CompiledGraph,
        source: ModelWeights,
        faults: Faults,
        verification: Verification | None = None,
        choices: Choices = HOSTS,
        account: CallStats | None = None,
        kind: str | None = None,
        alike: int = 1,
        pieces: Pieces | None = None,
    ) -> None:
        """Bind a graph to a place.

        Args:
            place: the place.
            graph: a ready graph of it.
            source: the model's weights.
            faults: what failed in our code in this session.
            verification: what is kept where every call is compared.
            choices: what chooses the kernels of its operators.
            account: what all regions of the model note of their calls.
            kind: the key of its kind's first graph; None: of this one.
            alike: how many places of the model are alike.
            pieces: replays places by themselves; None: nothing does.
        """
        self.place = place
        self.graph = graph
        #: How many calls the graph has served here.
        self.calls = 0
        self.begin_run()
        self._account = account or CallStats()
        self._kind = kind or graph.key
        self._source = source
        self._guard = InputGuard(graph, source.device)
        left = tuple(host_layer.paths(graph.description.module))
        rounded = set(host_layer.rounded_paths(graph.description.module))
        #: Layers of the host's whose inputs the graph rounds, with their paths.
        self._rounded = [(path, place.module.get_submodule(path)) for path in sorted(rounded)]
        self._weights = RegionWeights(
            place.module,
            () if graph.loaded is None else graph.loaded.weights,
            source,
            {path: path in rounded for path in left},
        )
        #: Parts that a call may bring itself: those that the graph calls, and the others.
        self._brought = frozenset(place.form.given).intersection(left)
        self._held = frozenset(place.form.given) - self._brought
        self._verifier = Verifier(place, graph, self._account, verification)
        #: The memory order of the dimensions of the host's results at a learned place (`order_of`).
        self._orders: Sequence[list[int] | None] = ()
        self.serve(None)
        self._faults = faults
        self._choices = choices
        self._alike = alike
        self._pieces = pieces
        formats_left = (formats.of(place.module.get_submodule(path)) for path in left)
        #: Whether a library keeps memory for each stream for products that the graph calls.
        self._by_stream = any(f is not None and f.takes_memory_by_stream for f in formats_left)

    def begin_run(self) -> None:
        """A run starts: nothing is declined yet."""
        self.declined: Reason | None = None
        #: Whether the host made a call that the graph was compared in; and why no more calls like
        #: it are served yet.
        self.is_compared = False
        self.unsure: Reason | None = None

    def serve(
        self,
        guests: ForeignCode | None,
        others: Sequence[Region] = (),
        bringing: Region | None = None,
    ) -> None:
        """Say how calls are served from now on.

        Args:
            guests: others' code in parts of the place, which the graph calls.
            others: the place's regions for calls that this graph does not accept.
            bringing: the place's region for calls that bring parts which this graph holds.
        """
        self._own_guests, self._others, self._bringing = guests, others, bringing
        self._serve(guests)

    def _serve(self, guests: ForeignCode | None) -> None:
        """Say whose code a call runs through."""
        self._guests = guests
        self._words: Collection[str] = () if guests is None else guests.words
        self._verifier.serve("" if guests is None else guests.code)

    def __call__(
        self,
        *inputs: Any,
        options: dict[str, Any] | None = None,
        live: Mapping[str, Any] = MappingProxyType({}),
        form: InputForm | None = None,
    ) -> Any:
        device, in_capture = self._source.device, is_ours()
        problem = self._faults.of(self.graph.key) or foreign_capture(device)
        problem = problem or surroundings.foreign(device)
        if problem is not None:
            return self.decline(problem)
        if not in_capture:  # in which nothing can be waited for
            self._account.lookahead.wait(device)
        check_cancelled()  # as the host does before each operator
        try:
            with nullcontext() if in_capture else pause_host_compiler():
                form = form_of(inputs) if form is None else form
                if live and not self._held.isdisjoint(live):
                    return self._by_bringing(inputs, form, options=options, live=live)
                elements = self._guard.good.get(form)
                misfit = None
                if elements is None or self._rounded:
                    misfit = self.misfit(inputs, form)
                if misfit is not None:
                    return self._by_another(misfit, inputs, form, options=options, live=live)
                return self._compute(inputs, form, elements, options, live)
        except Exception as error:
            if in_capture or is_interrupt(error) or passes(error):
                raise
            label = self.graph.description.label
            return self.decline(self._faults.note(self.graph.key, label, error))

    def _by_another(
        self, misfit: GuardFailure, inputs: tuple[Any, ...], form: InputForm, **brought: Any
    ) -> Any:
        """The results of a call that this graph does not accept, or None for the host."""
        for other in self._others:
            if other.misfit(inputs, form) is None:
                result = other(*inputs, form=form, **brought)
                return self.decline(other.declined or misfit.reason) if result is None else result
        if misfit.needs is not None:
            self._account.needs.add((self._kind, misfit.needs.name))
        return self.decline(misfit.reason)

    def _by_bringing(self, inputs: tuple[Any, ...], form: InputForm, **brought: Any) -> Any:
        """The results of a call that brings a part which this graph holds, or None for the host."""
        if self._bringing is None:
            self._account.needs.add((self._kind, GIVEN))
            return self.decline(BROUGHT)
        result = self._bringing(*inputs, form=form, **brought)
        return self.decline(self._bringing.declined or BROUGHT) if result is None else result

    def misfit(self, inputs: tuple[Any, ...], form: InputForm) -> GuardFailure | None:
        """Say why the graph does not accept a call; None: it does."""
        if self._rounded and (problem := host_layer.why_not_rounded(self._rounded)) is not None:
            return GuardFailure(problem, UNROUNDED)
        return self._guard.misfit(inputs, form)

    def _compute(
        self,
        inputs: tuple[Any, ...],
        form: InputForm,
        elements: int | None,
        options: dict[str, Any] | None,
        live: Mapping[str, Any],
    ) -> Any:
        """Compute a call that the graph accepts.

        Args:
            elements: of its largest tensor; None if its inputs need preparation.
        """
        loaded = self.graph.status.loaded
        if loaded is None:
            return self.decline(self.graph.reason or of("dropped"))
        guests = self._own_guests
        if live and (given := {path: live[path] for path in self._brought if path in live}):
            guests = with_given(guests, given)
        if guests is not self._guests:
            self._serve(guests)
        if (problem := self._verifier.why_not()) is not None:
            return self.decline(problem)
        ready: Sequence[Any] = inputs
        if elements is None:
            ready, elements = self._guard.made_ready(inputs, form)
        try:
            weights = self._weights.fetch()
        except ValueError as error:
            return self.decline(of("weights_unfit", error=error))
        try:
            with self._context(weights, options, live):
                if not self._verifier.covers(weights.weight_class, elements):
                    return self._compared(loaded.call, weights, inputs, ready, elements)
                run = self._runner(loaded.call, weights, ready, form)
                del ready  # the graph frees each input as soon as it can
                try:
                    results = _tensors(run())
                except Exception as error:
                    if (reason := self._failed(error)) is None:
                        raise
                    return self.decline(reason)
                return self._given(inputs, results)
        except torch.OutOfMemoryError:
            if is_ours():
                raise
            if weights.given and weights.release is not None:
                self._source.note_no_room()
            return self.decline(of("oom"))
        finally:
            if weights.release is not None:
                weights.release()

    def _compared(
        self,
        call: GraphCall,
        weights: Fetched,
        inputs: tuple[Any, ...],
        ready: Sequence[Any],
        elements: int,
    ) -> Any:
        """Compute a call in which the graph is compared.

        Args:
            ready: its inputs, prepared.
        """
        if (problem := self._verifier.why_uncompared(weights.weight_class)) is not None:
            return self.decline(problem)
        if is_ours():
            raise RuntimeError("a graph was not compared with eager yet")
        guests, verifier, beside = self._guests, self._verifier, self.place.form.beside
        if guests is None and beside:
            return self._by_host(inputs, weights.weight_class, elements)
        theirs = options_of_step().get(ATTENTION)
        if theirs is in_eight_bits:  # by the host's own code, in the block that it is compared with
            theirs = None
        sample = verifier.sample(list(ready), elements)
        if theirs or (guests is not None and guests.live.parts):
            sample = Sample(list(ready), True, elements)  # such code may know the call's sizes
        record = None
        if theirs or guests is not None:
            record = RecordedCall(self._words, theirs)
        run = partial(call, [*weights.tensors, *ready])
        del ready
        verifier.record = record
        try:
            with using(record=record):
                with host_attention.asking(None if record is None else record.attending):
                    results = self._run(run)
                if results is None:
                    return None
                try:
                    with nullcontext() if sample.whole else using(arguments={}, choice=None):
                        verdict = verifier.compare(call, results, weights, sample)
                except torch.OutOfMemoryError:
                    return self.decline(of("oom_comparing"))
        finally:
            verifier.record = None
        is_bad = verdict.outcome is Outcome.BAD
        if not is_bad and not beside:
            return self._given(inputs, results)
        if is_bad:
            self.decline(verdict.reason)
        if not sample.whole or not verdict.references:
            return None
        return self._given(inputs, verdict.references, by_graph=False)

    # --- a call that the host makes, and the graph beside it -------------------------------------

    def _by_host(self, inputs: tuple[Any, ...], weight_class: str, elements: int) -> Any:
        """Leave a call to the host, and compare its result; without memory for copies of the inputs
        the comparison is inconclusive.
        """
        self._account.beside += 1
        self.is_compared = True
        try:
            kept = Inputs.of(inputs)
        except torch.OutOfMemoryError:
            return self._no_memory(weight_class)
        options = options_of_step()
        return ByHost(kept, partial(self._beside, options=options, elements=elements))

    def _no_memory(self, weight_class: str) -> None:
        self.unsure = of("learned_unsure")
        self._verifier.note_unsure(weight_class)

    def _beside(self, call: ByHost, result: Any, *, options: dict[str, Any], elements: int) -> None:
        """Compare the host's result with the graph's. Any failure concerns only this graph, because
        the call is already made.
        """
        try:
            with using(options=options, arguments={}), pause_host_compiler():
                self._judge_beside(call, result, elements)
        except Exception as error:
            if is_interrupt(error):
                raise
            self.decline(self._faults.note(self.graph.key, self.graph.description.label, error))

    def _judge_beside(self, call: ByHost, result: Any, elements: int) -> None:
        form, loaded, inputs = self.place.form, self.graph.status.loaded, call.inputs
        if loaded is None or self._guests is not None:  # dropped, or called otherwise, meanwhile
            return None
        parted = call.parted(result)
        if parted is None:
            return self._refuse(of("learned_gives"))
        if inputs.are_changed(form.writes):
            return self._refuse(of("learned_changes_object"))
        given = inputs.before(form.writes)
        ready, _ = self._guard.made_ready(given, form_of(given))
        weights = self._weights.fetch()
        try:
            with self._context(weights):
                ours = self._run(partial(loaded.call, [*weights.tensors, *ready]))
            if ours is None:
                return None
            left = [inputs.live[i] for i in form.writes]
            theirs = (*left, *parted)
            sample = Sample(given, True, elements)
            mine, self._orders = ours[len(left) :], self._orders or list(map(order_of, parted))
            if len(mine) != len(parted) or laid_otherwise(laid(mine, self._orders), parted):
                return self._refuse(of("learned_gives"))
            verdict = self._verifier.judge(ours, theirs, weights, sample)
            if verdict.outcome is Outcome.BAD:
                self.decline(verdict.reason)
            elif verdict.outcome is Outcome.UNSURE:
                self.unsure = of("learned_unsure")
        except torch.OutOfMemoryError:
            self._no_memory(weights.weight_class)
        finally:
            if weights.release is not None:
                weights.release()

    def _refuse(self, problem: Reason) -> None:
        """Use the graph at this place no more."""
        self._verifier.misplaced = problem
        self.decline(problem)

    def _runner(
        self, call: GraphCall, weights: Fetched, ready: Sequence[Any], form: InputForm
    ) -> Callable[[], Any]:
        """Return what runs the graph: a replay, if this place is replayed in this step."""
        pieces = self._pieces
        if pieces is None or not pieces.is_open:
            return partial(call, [*weights.tensors, *ready])
        is_kept, others = self._weights.are_kept, self._verifier.others
        call_of_place = PlaceCall(
            self if is_kept else (self.graph.key, others, frozenset(weights.given)),
            form,
            call,
            weights,
            ready,
            live_arguments.of_call(),
            self._source.make_room,
            shared=not is_kept,
            own_stream=self.graph.key if self._by_stream else None,
        )
        return partial(pieces.run, call_of_place)

    def _context(self, weights: Fetched, options: Any = None, live: Any = None) -> using:
        """What the graph's operators read of this call."""
        before, choices = now(), self._choices
        if options is None:
            options, live = before.options, before.arguments
        own = (options, live, self.place.module, choices.products, weights.given, self._words)
        rest = (None, choices.attention, self._alike, before.recorder, before.layers_attend)
        return using(CallContext._make((*own, *rest)))

    @property
    def keeps_weights(self) -> bool:
        """Whether it has the weights of its next call."""
        return self._weights.are_kept

    def let_weights_go(self) -> None:
        """Keep no weights beyond a run."""
        self._weights.let_go()

    def decline(self, reason: Reason) -> Any:
        """Leave this call to the host for a reason; the returned None is the region's result."""
        self.declined = reason
        self._account.declined[reason.key] = reason
        return None

    def _run(self, run: Callable[[], Any]) -> Any:
        """Run the graph: its results, a tuple; None where it could not."""
        try:
            return _tensors(run())
        except Exception as error:
            if (reason := self._failed(error)) is None:
                raise
            return self.decline(reason)

    def _failed(self, error: Exception) -> Reason | None:
        """Drop a graph that raised, for this reason; None: it is the call's problem, or the
        host's.
        """
        if isinstance(error, host_layer.UnfitError):
            assert self._guests is not None
            self.graph.unfit[self._guests.code] = error.reason
            return error.reason
        if isinstance(error, torch.OutOfMemoryError) or is_ours() or passes(error):
            return None
        reason = of("failed_running", sort=type(error).__name__, error=error)
        self.graph.drop(reason)
        logger.warning("%s runs at normal speed: %s", self.graph.description.label, reason)
        return reason

    def _given(
        self, inputs: tuple[Any, ...], results: tuple[torch.Tensor, ...], *, by_graph: bool = True
    ) -> Any:
        """What a form's reference returns: a single tensor without a tuple; inputs as the host's
        code leaves them.

        Args:
            by_graph: whether the graph has served this call.
        """
        self.calls += by_graph
        self._account.calls += by_graph
        form = self.place.form
        if any(self._orders):
            count = len(form.writes)
            results = (*results[:count], *laid(results[count:], self._orders))
        if form.writes:
            results = leave(form, inputs, results)
        return results if len(results) > 1 else results[0]


def _tensors(given: Any) -> tuple[torch.Tensor, ...]:
    """What a graph gave."""
    results: tuple[torch.Tensor, ...] = tuple(given)
    if not results:
        raise IndexError("a graph must return tensors, got none")
    for result in results:
        if type(result) is not torch.Tensor:
            raise TypeError(f"a graph must return tensors, got a {type(result).__name__}")
    return results
