"""Which single places of a root module are replayed, in a call that is not replayed whole.

Between two places Python code runs, the host's or another's, which may read from the GPU or keep
its arguments. So each place's call is captured alone: its inputs are copied in, its results out.
That pays where the GPU waits for the processor, which shows at the places themselves: the GPU has
finished one before the next is queued.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..device import gpu
from ..host_api.execution import is_interrupt, passes
from ..host_api.memory import empty_cache
from ..operators import host_attention
from ..operators.call_context import using
from ..reasons import Reason, of
from ..weights.fetching import Fetched
from . import driver, streams
from .capture_gate import CAPTURE_GATE
from .captured_call import why_not
from .captures import MIN_FREE_BYTES
from .memory import CapturedMemory
from .own_pools import make_graph
from .piece import Call, Piece, Statics, form_of, tensors_of
from .piece_weights import Copies, InPlace, Weights
from .replay_check import why_other
from .replays import CLEAN_CALLS, STEPS_LEFT

logger = logging.getLogger(__name__)

#: At so many of a step's places the GPU must have kept up with the processor.
IDLE_SHARE = 0.3
#: Forms of calls that are remembered, of all places.
MAX_KNOWN = 4096


@dataclass
class _Known:
    """What is known of one form of calls at one place."""

    clean: int = 0
    piece: Piece | None = None
    weights: Weights | None = None
    refused: Reason | None = None
    #: Forms of what a call gave.
    results: tuple[Any, ...] = ()


class Pieces:
    """The captured places of one root module."""

    def __init__(self, memory: CapturedMemory) -> None:
        """Set up; nothing is captured yet.

        Args:
            memory: the memory that all captured graphs share.
        """
        self._memory = memory
        self._statics = Statics()
        self._known: dict[Hashable, _Known] = {}
        self._streams: dict[Hashable, streams.OwnStream] = {}
        self._arithmetic: Hashable = None
        self._steps_begun = 0
        self._left = 0
        #: Calls that were made since the step began, and at how many of them the GPU kept up.
        self._made = self._idle = 0
        self._pays = False
        #: Whether nobody could make room for a capture in this run.
        self._is_crowded = False
        self._mark: Any = None
        #: Whether a call is under way whose places may be replayed.
        self.is_open = False
        self.captures = 0
        self.replayed = 0
        #: Why places are cut, or not captured, by reason.
        self.cuts: Counter[Reason] = Counter()
        self.refused: Counter[Reason] = Counter()

    def fresh(self) -> Pieces:
        """Return one for another root module, over the same memory."""
        return Pieces(self._memory)

    # --- a run ------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Try again what had no room in the last run."""
        self._steps_begun, self._made, self._idle = 0, 0, 0
        self._pays, self._is_crowded, self._mark = False, False, None
        for known in self._known.values():
            if known.refused is not None and known.refused.retry:
                known.refused = None

    def end_run(self) -> None:
        """Keep no weights: the host may load the model again, and needs the room."""
        for known in self._known.values():
            if known.weights is not None:
                known.weights.forget()

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
        self._mark = None
        self._left = 0 if steps is None else steps - self._steps_begun
        self._steps_begun += 1
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    # --- a place ----------------------------------------------------------------------------------

    def run(
        self,
        place: Hashable,
        form: Hashable,
        call: Call,
        fetched: Fetched,
        inputs: Sequence[Any],
        live: Mapping[str, Any],
        make_room: Callable[[int], None],
        *,
        shared: bool = False,
        own_stream: Hashable = None,
    ) -> tuple[torch.Tensor, ...]:
        """Compute one place, by replay if it was captured.

        Args:
            place: which one, or the key of a piece that several share; kept alive.
            form: of its inputs, with the values of those that are not tensors.
            call: its graph, called with weights and inputs.
            fetched: its weights.
            inputs: its activations.
            live: what the call brings along for its attention.
            make_room: frees so many bytes of the model's weights, if possible.
            shared: whether the weights are copied into the piece at each call, because they are
                loaded again; else they stay in place until the epoch ends.
            own_stream: what calls have in common that need their own stream, because a library
                keeps memory for it; None: none is needed.

        Returns:
            What the graph gives.
        """
        brought = tuple((name, form_of(value)) for name, value in live.items())
        key = place, form, brought, host_attention.name_of_step()
        known = self._known.get(key)
        if known is None:
            known = self._known_anew(key)
        piece, weights = known.piece, known.weights
        if piece is not None:
            assert weights is not None
            if not weights.take(fetched):
                if not shared:  # else it serves other places
                    self._memory.drop(piece)
            elif shared:
                return self._by_copies(piece, weights, call, fetched, inputs, live)
            elif (results := self._replay(piece, inputs, live)) is not None:
                return results
        elif self._is_due(known) and self._has_room(known, inputs, make_room):
            own = own_stream, form
            results = self._capture(known, call, fetched, inputs, live, shared, own)
            if results is not None:
                return results
        results = tuple(call([*fetched.tensors, *inputs]))
        if self._mark is not None:
            self._made += 1
            self._idle += gpu.is_passed(self._mark)
        self._mark = gpu.mark(tensors_of(inputs)[0].device)
        if not known.clean:
            known.results = tuple(map(form_of, results))
        known.clean += 1
        return results

    def _by_copies(
        self,
        piece: Piece,
        weights: Weights,
        call: Call,
        fetched: Fetched,
        inputs: Sequence[Any],
        live: Mapping[str, Any],
    ) -> tuple[torch.Tensor, ...]:
        """The results by a piece that has copies of what was fetched, which is freed first: so
        the next weights may come while this place computes.
        """
        if fetched.release is not None:
            fetched.release()
        with _reading(weights):
            results = self._replay(piece, inputs, live)
            return tuple(call([*weights.tensors, *inputs])) if results is None else results

    def _replay(
        self, piece: Piece, inputs: Sequence[Any], live: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...] | None:
        """A piece's results, or None if it has no memory now: then all are dropped."""
        try:
            results = piece.replay(inputs, live)
        except RuntimeError as error:  # the driver allocates a graph's memory when it runs
            if passes(error) or "out of memory" not in str(error):
                raise
            self._memory.drop_all(tensors_of(inputs)[0].device)
            self.refused[of("no_memory")] += 1
            return None
        self._memory.note_use(piece)
        self.replayed += 1
        return results

    def _known_anew(self, key: Hashable) -> _Known:
        while len(self._known) >= MAX_KNOWN:
            oldest = self._known.pop(next(iter(self._known)))
            if oldest.piece is not None:
                self._memory.drop(oldest.piece)
        known = self._known[key] = _Known()
        return known

    def _is_due(self, known: _Known) -> bool:
        needed = 1 if self._left >= STEPS_LEFT else CLEAN_CALLS
        return self._pays and known.refused is None and known.clean >= needed

    def _has_room(
        self, known: _Known, inputs: Sequence[Any], make_room: Callable[[int], None]
    ) -> bool:
        """Whether the driver has room for a capture, after others have made some."""
        device = tensors_of(inputs)[0].device
        if not self._is_crowded:
            for make in (_empty_cache, make_room):
                if (missing := MIN_FREE_BYTES - driver.free_bytes(device)) > 0:
                    make(missing)
        if driver.free_bytes(device) >= MIN_FREE_BYTES:
            return True
        self._is_crowded = True
        self._refuse(known, of("no_room"))
        return False

    def _capture(
        self,
        known: _Known,
        call: Call,
        fetched: Fetched,
        inputs: Sequence[Any],
        live: Mapping[str, Any],
        shared: bool,
        own_stream: tuple[Hashable, Hashable],
    ) -> tuple[torch.Tensor, ...] | None:
        """Capture a call and compute it; None if it cannot be captured."""
        device = tensors_of(inputs)[0].device
        piece = None
        try:
            pool = self._memory.pool(device)  # which may drop others, and what they share
            before, held = driver.reserved_bytes(device), self._statics.held_bytes
            weights: Weights = Copies(fetched, self._statics) if shared else InPlace(fetched)
            stream = self._stream_for(own_stream, device, partial(_rehearse, call, weights, inputs))
            piece = Piece(stream, pool, self._statics, partial(make_graph, device))
            with _reading(weights):
                piece.capture(call, weights.tensors, inputs, live, known.results)
                problem = None
                if piece.cuts:  # others' code is called once a step
                    results = piece.given()
                else:  # what was captured gave the same: no copies of it beside these
                    results = tuple(call([*weights.tensors, *inputs]))
                    problem = why_other(piece.results, results)
        except Exception as error:
            if piece is not None:
                self._memory.discard(piece, device)
            if is_interrupt(error) or passes(error):
                raise
            self._refuse(known, why_not(error))
            logger.warning("Not captured as a CUDA graph: %s", known.refused)
            return None
        if problem is not None:
            self._memory.discard(piece, device)
            self._refuse(known, problem)
            return results
        grown = driver.reserved_bytes(device) - before
        made = self._statics.held_bytes - held
        if not driver.is_driver_allocator():
            grown -= made
        piece.own_bytes = made + weights.held_bytes
        known.piece, known.weights = piece, weights
        if (problem := self._memory.add(piece, self, device, grown)) is not None:
            self._refuse(known, problem)
        self.captures += 1
        self.cuts.update(piece.cuts)
        return results

    def _stream_for(
        self, own: tuple[Hashable, Hashable], device: torch.device, run: Callable[[], Any]
    ) -> Any:
        """The stream to capture on, where libraries have all the memory that the call needs."""
        if own[0] is None:
            return streams.shared(device)
        found = self._streams.get(own)
        if found is None:
            found = streams.OWN.take(device)
            streams.rehearse(found, device, run)
            self._streams[own] = found
        else:  # they may have been freed since the rehearsal
            streams.make_workspaces(found.stream, device)
        return found.stream

    def _refuse(self, known: _Known, reason: Reason) -> None:
        known.refused = reason
        self.refused[reason] += 1

    # --- memory -----------------------------------------------------------------------------------

    def forget(self, graph: Any, *, crowded: bool) -> None:
        """See `memory.Owner`: a place is captured again when it repeats, or not in this run if
        others needed the room.
        """
        for known in self._known.values():
            if known.piece is graph:
                known.piece = known.weights = None
                if crowded:
                    known.refused = of("no_room")

    def drop(self) -> None:
        """Give all memory back and forget every place."""
        for known in list(self._known.values()):
            if known.piece is not None:
                self._memory.drop(known.piece)
        self._known.clear()
        for own in self._streams.values():
            streams.OWN.give_back(own.stream.device, own)
        self._streams.clear()

    @property
    def captured(self) -> int:
        """How many calls of places are captured now."""
        return sum(known.piece is not None for known in list(self._known.values()))

    @property
    def vram_bytes(self) -> int:
        """VRAM that all captured graphs of the process hold; most of it is shared."""
        return self._memory.used_bytes


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


def _rehearse(call: Call, weights: Weights, inputs: Collection[Any]) -> None:
    with _reading(weights, recorder=_Rehearsal()):
        call([*weights.tensors, *inputs])
