"""Which single places of a root module are replayed, in a call that is not replayed whole.

Between two places Python code runs, the host's or another's, which may read from the GPU or keep
its arguments. So each place's call is captured alone: its inputs are copied in, its results out.
That pays where the GPU waits for the processor, which shows at the places themselves: the GPU has
finished one before the next is queued, and took no longer for it than queueing did. (Where it took
longer, somebody's code waited for the GPU between the two, and will again.)
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..device import gpu
from ..host_api.memory import empty_cache
from ..operators import host_attention
from ..operators.call_context import using
from ..reasons import Reason, of
from ..weights.fetching import Fetched
from . import driver, streams
from .capture_gate import CAPTURE_GATE
from .capture_table import CaptureTable, KnownCall, missing_bytes
from .memory import CapturedMemory
from .piece import GraphCall, Piece, Statics, form_of, tensors_of
from .piece_weights import Copies, InPlace, Weights
from .replay_check import why_other
from .signatures import CaptureError

#: At so many of a step's places the GPU must have kept up with the processor.
IDLE_SHARE = 0.3
#: A place for which the GPU took so many times as long as queueing it kept the GPU busy.
BUSY_RATIO = 2.0
#: Forms of calls that are remembered, of all places.
MAX_KNOWN = 4096


class PlaceCall(NamedTuple):
    """One call of a place.

    Attributes:
        place: which one, or the key of a piece that several share; kept alive.
        form: of its inputs, with the values of those that are not tensors.
        graph: the place's graph, called with weights and inputs.
        fetched: its weights.
        inputs: its activations.
        live: what the call brings along for its attention.
        make_room: frees so many bytes of the model's weights, if possible.
        shared: whether the weights are copied into the piece at each call, because they are loaded
            again; else they stay in place until the epoch ends.
        own_stream: what calls have in common that need their own stream, because a library keeps
            memory for it; None: none is needed.
    """

    place: Hashable
    form: Hashable
    graph: GraphCall
    fetched: Fetched
    inputs: Sequence[Any]
    live: Mapping[str, Any]
    make_room: Callable[[int], None]
    shared: bool = False
    own_stream: Hashable = None

    @property
    def device(self) -> torch.device:
        """Where its activations are."""
        return tensors_of(self.inputs)[0].device

    def made(self, weights: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """What the graph gives with these weights."""
        return tuple(self.graph([*weights, *self.inputs]))


class _Queued(NamedTuple):
    """A place's work in the GPU's queue: where it begins and ends, and how long queueing took."""

    begin: Any
    end: Any
    seconds: float

    def left_idle(self) -> bool:
        """Tell, once the next place is queued, whether the GPU waited for it."""
        return gpu.is_passed(self.end) and (
            gpu.seconds_between(self.begin, self.end) <= BUSY_RATIO * self.seconds
        )


@dataclass
class _Place(KnownCall):
    """What is known of one form of calls at one place."""

    #: Forms of what a call gave.
    results: tuple[Any, ...] = ()

    def make_way(self) -> None:
        self.refused = of("no_room")


class Pieces(CaptureTable[_Place]):
    """The captured places of one root module."""

    def __init__(self, memory: CapturedMemory) -> None:
        """Set up; nothing is captured yet. `memory` is what all captured graphs share."""
        super().__init__(memory, _Place, MAX_KNOWN)
        self._statics = Statics()
        self._streams: dict[Hashable, streams.OwnStream] = {}
        self._arithmetic: Hashable = None
        #: Calls that were made since the step began, and how many of them left the GPU idle.
        self._made = self._idle = 0
        self._pays = False
        #: Whether nobody could make room for a capture in this run.
        self._is_crowded = False
        self._queued: _Queued | None = None
        #: Whether a call is under way whose places may be replayed.
        self.is_open = False
        #: Why places are cut, or not captured, by reason.
        self.cuts: Counter[Reason] = Counter()
        self.refused: Counter[Reason] = Counter()

    def fresh(self) -> Pieces:
        """Return one for another root module, over the same memory."""
        return Pieces(self._memory)

    # --- a run ------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        super().begin_run()
        self._made = self._idle = 0
        self._pays, self._is_crowded, self._queued = False, False, None

    def end_run(self) -> None:
        """Keep no weights: the host may load the model again, and needs the room."""
        for known in self._table.values():
            if known.graph is not None:
                known.graph.weights.forget()

    @contextlib.contextmanager
    def open(self, steps: int | None, arithmetic: Hashable) -> Iterator[None]:
        """Until this ends, places may be replayed: one call of the root module.

        Args:
            steps: of the sampler's run; None: not known.
            arithmetic: what else changes which kernels the same graphs call.
        """
        if arithmetic != self._arithmetic:
            self.drop()
            self._arithmetic = arithmetic
        if self._made:
            self._pays = self._idle >= IDLE_SHARE * self._made
        self._made = self._idle = 0
        self._queued = None
        self._begin_step(steps)
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    # --- a place ----------------------------------------------------------------------------------

    def run(self, one: PlaceCall) -> tuple[torch.Tensor, ...]:
        """Compute one place, by replay if it was captured; what its graph gives."""
        brought = tuple((name, form_of(value)) for name, value in one.live.items())
        known = self._find((one.place, one.form, brought, host_attention.name_of_step()))
        piece: Piece | None = known.graph
        if piece is not None:
            if not piece.weights.take(one.fetched):
                if not one.shared:  # else it serves other places
                    self._drop(piece)
            elif one.shared:
                return self._by_copies(piece, one)
            elif (results := self._replay(piece, one)) is not None:
                return results
        elif self._pays and self._is_due(known, early=True) and self._has_room(known, one):
            results = self._capture(known, one)
            if results is not None:
                return results
        results = self._queue(one)
        if not known.clean:
            known.results = tuple(map(form_of, results))
        known.clean += 1
        return results

    def _queue(self, one: PlaceCall) -> tuple[torch.Tensor, ...]:
        """The results of a call; and whether the one before left the GPU idle meanwhile."""
        began, begin = time.perf_counter(), gpu.mark(one.device)
        results = one.made(one.fetched.tensors)
        queued = _Queued(begin, gpu.mark(one.device), time.perf_counter() - began)
        if self._queued is not None:
            self._made += 1
            self._idle += self._queued.left_idle()
        self._queued = queued
        return results

    def _by_copies(self, piece: Piece, one: PlaceCall) -> tuple[torch.Tensor, ...]:
        """The results by a piece that has copies of what was fetched, which is freed first: so
        the next weights may come while this place computes.
        """
        if one.fetched.release is not None:
            one.fetched.release()
        weights = piece.weights
        with _reading(weights):
            results = self._replay(piece, one)
            return one.made(weights.tensors) if results is None else results

    def _replay(self, piece: Piece, one: PlaceCall) -> tuple[torch.Tensor, ...] | None:
        """A piece's results, or None if it has no memory now: then all are dropped."""
        try:
            results = self._computed(piece.device, partial(piece.replay, one.inputs, one.live))
        except CaptureError as error:
            self.refused[error.reason] += 1
            return None
        self._count(piece)
        return results

    def _has_room(self, known: _Place, one: PlaceCall) -> bool:
        """Whether the driver has room for a capture, after others have made some."""
        if not self._is_crowded:
            for make in (_empty_cache, one.make_room):
                if (missing := missing_bytes(one.device)) > 0:
                    make(missing)
        if missing_bytes(one.device) <= 0:
            return True
        self._is_crowded = True
        self._refuse(known, of("no_room"))
        return False

    def _capture(self, known: _Place, one: PlaceCall) -> tuple[torch.Tensor, ...] | None:
        """Capture a call and compute it; None if it cannot be captured."""
        device = one.device
        piece = None
        try:
            pool = self._memory.on(device).pool()  # which may drop others, and what they share
            before, held = driver.reserved_bytes(device), self._statics.held_bytes
            weights = Copies(one.fetched, self._statics) if one.shared else InPlace(one.fetched)
            stream = self._stream_for(one, partial(_rehearse, one, weights))
            piece = Piece(stream, pool, self._statics, partial(driver.make_graph, device), weights)
            with _reading(weights):
                piece.capture(one.graph, weights.tensors, one.inputs, one.live, known.results)
                problem = None
                if piece.cuts:  # others' code is called once a step
                    results = piece.given()
                else:  # what was captured gave the same: no copies of it beside these
                    results = one.made(weights.tensors)
                    problem = why_other(piece.results, results)
        except Exception as error:
            self._drop(piece)
            self._failed(known, error)
            self._refuse(known, known.refused)
            return None
        if problem is not None:
            self._drop(piece)
            self._refuse(known, problem)
            return results
        grown = driver.reserved_bytes(device) - before
        made = self._statics.held_bytes - held
        if not driver.is_driver_allocator():
            grown -= made
        piece.own_bytes = made + weights.held_bytes
        self._keep(known, piece, grown)
        self._refuse(known, known.refused)
        self.cuts.update(piece.cuts)
        return results

    def _stream_for(self, one: PlaceCall, rehearse: Callable[[], Any]) -> Any:
        """The stream to capture on, where libraries have all the memory that the call needs."""
        if one.own_stream is None:
            return streams.shared(one.device)
        own = one.own_stream, one.form
        found = self._streams.get(own)
        if found is None:
            found = streams.OWN.take(one.device)
            streams.rehearse(found, one.device, rehearse)
            self._streams[own] = found
        else:  # they may have been freed since the rehearsal
            streams.make_workspaces(found.stream, one.device)
        return found.stream

    def _refuse(self, known: _Place, reason: Reason | None) -> None:
        """Note why a place is not captured, if it is not."""
        known.refused = reason
        if reason is not None:
            self.refused[reason] += 1

    def drop(self) -> None:
        super().drop()
        for own in self._streams.values():
            streams.OWN.give_back(own.stream.device, own)
        self._streams.clear()


def _empty_cache(_: int) -> None:
    with CAPTURE_GATE.loud():
        empty_cache()


class _Rehearsal:
    """Stands for code that must be called only once a step."""

    def stand_apart(
        self, run: Callable[..., Any], fake: Callable[..., Any], args: Any, why: Reason
    ) -> Any:
        return fake(*args)


def _reading(weights: Weights, **fields: Any) -> using:
    """Until this ends, let operators multiply by what a piece reads."""
    return using(**fields) if weights.given is None else using(given=weights.given, **fields)


def _rehearse(one: PlaceCall, weights: Weights) -> None:
    with _reading(weights, recorder=_Rehearsal()):
        one.made(weights.tensors)
