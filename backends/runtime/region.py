"""One place of a model bound to a graph: checks, weights, the call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from ..choices.choices import HOSTS, Choices
from ..cuda_graphs.captured_call import foreign_capture, is_ours
from ..cuda_graphs.piece import Call as GraphCall
from ..cuda_graphs.pieces import Pieces, PlaceCall
from ..graphs.compiled_graph import CompiledGraph
from ..host_api import formats
from ..host_api.execution import check_cancelled, host_compiler_pause, is_interrupt, passes
from ..host_api.options import ATTENTION
from ..kinds.tolerance import Outcome
from ..operators import host_attention, host_layer, live_arguments
from ..operators.call_context import options_of_step, using
from ..operators.recorded import Record
from ..plans.plan import Place
from ..reasons import Reason, of
from ..torch_api import surroundings
from ..weights.fetching import Fetched, ModelWeights, RegionWeights
from .beside import ByHost, Inputs, laid, laid_otherwise, order_of
from .faults import Faults
from .input_guard import Form, InputGuard, form_of
from .specializations import UNROUNDED, CallStats, GuardFailure
from .verification import Verification
from .verifier import Sample, Verifier
from .wiring import Guests
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
        self._guests: Guests | None = None
        self._others: Sequence[Region] = ()
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
        self._verifier = Verifier(place, graph, self._account, verification)
        #: The memory order of the dimensions of the host's results at a learned place (`order_of`).
        self._orders: Sequence[list[int] | None] = ()
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

    @property
    def graphs(self) -> list[CompiledGraph]:
        """All graphs that may compute a call here, its own first."""
        return [self.graph, *(other.graph for other in self._others)]

    def serve(self, guests: Guests | None, others: Sequence[Region] = ()) -> None:
        """Say how calls are served from now on.

        Args:
            guests: others' code in parts of the place, which the graph calls.
            others: the place's regions for calls that this graph does not accept.
        """
        self._guests, self._others = guests, others

    def __call__(self, *inputs: Any) -> Any:
        if (problem := self._why_not()) is not None:
            return self.decline(problem)
        if not (ours := is_ours()):  # nobody captures: within a capture nothing can be waited for
            self._account.lookahead.wait(self._source.device)
        check_cancelled()  # as the host does before each operator
        try:
            pause = None if ours else host_compiler_pause()
            if pause is None:
                return self._served(inputs)
            with pause:
                return self._served(inputs)
        except Exception as error:
            if ours or is_interrupt(error) or passes(error):
                raise
            label = self.graph.description.label
            return self.decline(self._faults.note(self.graph.key, label, error))

    def _why_not(self) -> Reason | None:
        """Why no call is served at this moment, if so."""
        if self._faults and (fault := self._faults.of(self.graph.key)) is not None:
            return fault
        device = self._source.device
        return foreign_capture(device) or surroundings.foreign(device)

    def _served(self, inputs: tuple[Any, ...]) -> Any:
        """The results, or None for the host to compute them."""
        form = form_of(inputs)
        elements = self._guard.good.get(form)
        misfit = None
        if elements is None or self._rounded:
            misfit = self.misfit(inputs, form)
        if misfit is None:
            return self._compute(inputs, form, elements)
        for other in self._others:
            if other.misfit(inputs, form) is None:
                result = other(*inputs)
                return self.decline(other.declined or misfit.reason) if result is None else result
        if misfit.needs is not None:
            self._account.needs.add((self._kind, misfit.needs.name))
        return self.decline(misfit.reason)

    def misfit(self, inputs: tuple[Any, ...], form: Form) -> GuardFailure | None:
        """Say why the graph does not accept a call; None: it does."""
        if self._rounded and (problem := host_layer.why_not_rounded(self._rounded)) is not None:
            return GuardFailure(problem, UNROUNDED)
        return self._guard.misfit(inputs, form)

    def _compute(self, inputs: tuple[Any, ...], form: Form, elements: int | None) -> Any:
        """Compute a call that the graph accepts.

        Args:
            elements: of its largest tensor; None if its inputs need preparation.
        """
        graph = self.graph
        loaded, guests = graph.outcome.loaded, self._guests
        if loaded is None:
            return self.decline(graph.reason or of("dropped"))
        call = loaded.call
        problem = self._verifier.why_not("" if guests is None else guests.code)
        if problem is not None:
            return self.decline(problem)
        ready = list(inputs)
        if elements is None:
            ready, elements = self._guard.made_ready(inputs, form)
        try:
            weights = self._weights.fetch()
        except ValueError as error:
            return self.decline(of("weights_unfit", error=error))
        try:
            trusted = self._verifier.covers(weights.weight_class, elements)
            problem = None if trusted else self._verifier.why_uncompared(weights.weight_class)
            if problem is not None:
                return self.decline(problem)
            if not trusted and is_ours():
                raise RuntimeError("a graph was not compared with eager yet")
            if not trusted and guests is None and self.place.form.beside:
                return self._by_host(inputs, weights.weight_class, elements)
            run = self._runner(call, weights, ready, form if trusted else None)
            sample = None if trusted else self._verifier.sample(ready, elements)
            theirs = None if trusted else options_of_step().get(ATTENTION)
            if sample is not None and (theirs or (guests is not None and guests.live.parts)):
                sample = Sample(ready, True, elements)  # such code may know the call's sizes
            record = None
            if sample is not None and (theirs or guests is not None):
                record = Record(() if guests is None else guests.words, theirs)
            self._verifier.record = record
            del ready  # the graph lets go of an input as soon as it can
            with self._context(weights, record):
                with host_attention.asking(None if record is None else record.attending):
                    results = self._run(run)
                if results is None:
                    return None
                if sample is None:
                    return self._given(inputs, results)
                try:
                    with nullcontext() if sample.whole else using(arguments={}, choice=None):
                        verdict = self._verifier.compare(call, results, weights, sample)
                except torch.OutOfMemoryError:
                    return self.decline(of("oom_comparing"))
        except torch.OutOfMemoryError:
            if is_ours():
                raise
            if weights.given and weights.release is not None:
                self._source.note_no_room()
            return self.decline(of("oom"))
        finally:
            self._verifier.record = None
            if weights.release is not None:
                weights.release()
        is_bad = verdict.outcome is Outcome.BAD
        if not is_bad and not self.place.form.beside:
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
            with using(options=options, arguments={}), host_compiler_pause() or nullcontext():
                self._judge_beside(call, result, elements)
        except Exception as error:
            if is_interrupt(error):
                raise
            self.decline(self._faults.note(self.graph.key, self.graph.description.label, error))

    def _judge_beside(self, call: ByHost, result: Any, elements: int) -> None:
        form, loaded, inputs = self.place.form, self.graph.outcome.loaded, call.inputs
        if loaded is None:  # dropped meanwhile
            return None
        parted = call.parted(result)
        if parted is None:
            return self._refuse(of("learned_gives"))
        if inputs.are_changed(form.writes):
            return self._refuse(of("learned_changes_object"))
        self._verifier.why_not("")
        self._verifier.record = None
        given = inputs.before(form.writes)
        ready, _ = self._guard.made_ready(given, form_of(given))
        weights = self._weights.fetch()
        try:
            with self._context(weights, None):
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
        self, call: GraphCall, weights: Fetched, ready: list[Any], form: Form | None
    ) -> Callable[[], Any]:
        """Return what runs the graph: a replay, if this place is replayed in this step.

        Args:
            form: of the inputs; None if this call is not to be replayed.
        """
        pieces = self._pieces
        if form is None or pieces is None or not pieces.is_open:
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

    def _context(self, weights: Fetched, record: Record | None) -> using:
        """What the graph's operators go by; a `record` gets how others' code is called."""
        guests = self._guests
        return using(
            module=self.place.module,
            caller=self._choices.products,
            given=weights.given,
            others=() if guests is None else guests.words,
            record=record,
            choice=self._choices.attention,
            calls=self._alike,
        )

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
        graph = self.graph
        try:
            results: tuple[torch.Tensor, ...] = tuple(run())
            if not results:
                raise IndexError("a graph must return tensors, got none")
            for result in results:
                if type(result) is not torch.Tensor:
                    raise TypeError(f"a graph must return tensors, got a {type(result).__name__}")
        except torch.OutOfMemoryError:
            raise  # the call's problem, not this graph's
        except host_layer.UnfitError as error:
            assert self._guests is not None
            reason = graph.unfit[self._guests.code] = error.reason
            return self.decline(reason)
        except Exception as error:
            if is_ours() or passes(error):
                raise
            reason = of("failed_running", sort=type(error).__name__, error=error)
            graph.drop(reason)
            logger.warning("%s runs at normal speed: %s", graph.description.label, reason)
            return self.decline(reason)
        return results

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
