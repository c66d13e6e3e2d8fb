"""Which calls of a root module are replayed from CUDA graphs, and when they are captured.

The key of a call is its signature (`signatures.CallValues.key`). There are two sorts of captures:
the host's own forward, bit for bit (*exact*), while graphs of regions are pending; and the forward
with all regions compiled, once they are ready.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..device import gpu
from ..host_api.execution import check_cancelled
from ..reasons import NOTHING, Reason, of
from ..weights.addresses import AddressBook, Addresses
from . import driver
from .capture_table import CLEAN_CALLS, CaptureTable, KnownCall, missing_bytes
from .captured_call import CapturedCall
from .memory import CapturedMemory
from .replay_check import ReplayCheck, copies, is_proved, made, may_be_kept
from .signatures import CallValues, CaptureError, read_result, result_form

EXACT = "exact"
#: Signatures that are remembered.
MAX_SIGNATURES = 64
#: Signatures of which a call is kept that was made.
MAX_SHOWN = 8
#: Further clean calls that a signature needs after its graph was dropped for lack of room.
_BACK_OFF = 8


@dataclass
class _Signature(KnownCall):
    """What is known of one signature."""

    #: The form to capture, since when clean calls are counted.
    target: Hashable = None
    #: The form of what a call gave.
    like: CallValues | None = None
    #: The last call of this run that was made, by which a capture is proved.
    check: ReplayCheck | None = None
    #: Marks on the GPU around the last clean call.
    marks: tuple[Any, Any] | None = None
    #: In which form it is captured.
    form: Hashable = None

    def make_way(self) -> None:
        self.clean = -_BACK_OFF


class Attempt(NamedTuple):
    """The outcome of trying to replay a call.

    Attributes:
        result: of the call; None if it must be made.
        form: in which it was captured; None if it was not.
        compiled: whether to make it through the regions' graphs then.
        known: what is known of its signature.
        in_place: whether the weights are where a captured call could read them.
    """

    result: Any
    form: Hashable
    compiled: bool
    known: _Signature
    in_place: bool

    @property
    def may_come(self) -> bool:
        """Whether a call like this one will be captured as a whole, as far as is known."""
        return self.in_place and self.known.refused is None


class Replays(CaptureTable[_Signature]):
    """The captured calls of one root module."""

    def __init__(
        self,
        memory: CapturedMemory,
        limit_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Set up; nothing is captured yet.

        Args:
            memory: the memory that all captured graphs share.
            limit_s: the longest GPU time of a call worth capturing.
        """
        super().__init__(memory, _Signature, MAX_SIGNATURES)
        self._limit_s = limit_s
        #: Calls of regions that were replayed within them.
        self.regions = 0
        #: The places of those of this run.
        self.places: set[str] = set()
        #: Calls that could not be captured or replayed, by reason.
        self.reasons: Counter[Reason] = Counter()

    def fresh(self) -> Replays:
        """Return one for another root module, over the same memory."""
        return Replays(self._memory, self._limit_s)

    def attempt(
        self,
        host: Callable[..., Any],
        call: CallValues,
        *,
        book: AddressBook,
        form: Hashable,
        complete: bool,
        runner: Callable[..., Any],
        steps: int | None = None,
        ran: Collection[str] = (),
    ) -> Attempt:
        """Compute one call by replay if possible; otherwise `settle` must follow.

        Args:
            host: the call as the host would make it.
            call: its arguments.
            book: where the root module's weights are.
            form: which graphs serve regions now; `EXACT` for none.
            complete: whether no more graphs are pending; until then captures are exact.
            runner: makes the call while it is captured; `compiled`: through the regions' graphs.
            steps: of the sampler's run, each of which makes one call or more; None: not known.
            ran: filled with the places that graphs have served once `runner` has made a call.

        Raises:
            The host's interrupt, when the user cancelled.
        """
        check_cancelled()
        self._begin_step(steps)
        target = form if complete else EXACT
        known = self._find(call.key)
        if known.target != target:
            known.target, known.clean, known.refused = target, 0, None
        addresses = book.look()
        graph, used = known.graph, known.form
        result = None
        if addresses is None:
            self.reasons[book.problem or NOTHING] += 1
        elif graph is not None and (
            known.form == target or (known.refused and known.form == EXACT)
        ):
            if not graph.fits(addresses):
                self._drop(graph)
            else:
                try:
                    result = self._replay(graph, book, addresses, call.tensors)
                except CaptureError as error:
                    known.refused = error.reason
                if result is not None:
                    self._count(graph)
        elif (
            known.like is not None
            and self._is_due(known, early=self.captures > 0)
            and self._pays(known, complete)
        ):
            used = target

            def rerun(*args: Any, **kwargs: Any) -> Any:
                return runner(partial(host, *args, **kwargs), compiled=complete)

            result = self._capture(known, call, rerun, book, addresses, ran)
        in_place = book.problem is None
        # What will be captured without graphs is run without them until then.
        exact_next = not complete and known.refused is None and in_place
        may_come = result is None and in_place and known.refused is None
        known.check = None
        if may_come and may_be_kept(call.tensors):
            self._keep_few()
            with contextlib.suppress(torch.OutOfMemoryError):
                known.check = ReplayCheck(copies(call.tensors), book.epoch)
        known.marks = None if result is not None else (gpu.mark(call.tensors[0].device), None)
        form = None if result is None else used
        return Attempt(result, form, not exact_next, known, in_place)

    def settle(self, attempt: Attempt, book: AddressBook, result: Any, is_clean: bool) -> None:
        """Note the result of a call that was not replayed.

        Args:
            is_clean: whether nothing was compared with eager in it.
        """
        known = attempt.known
        if known.marks is not None:
            known.marks = (known.marks[0], gpu.mark(book.device))
        book.settle()
        known.like = None
        if not attempt.in_place:  # the next call may find weights of another kind
            known.clean = min(known.clean, 0)
        elif known.refused is None and is_clean:
            try:
                known.like = result_form(result)
                known.clean += 1
                given = read_result(result).tensors
                if known.check is not None and may_be_kept(given):
                    with contextlib.suppress(torch.OutOfMemoryError):
                        known.check.results = copies(given)
            except CaptureError as error:
                known.refused = error.reason
        if known.refused is not None:
            self.reasons[known.refused] += 1

    def _keep_few(self) -> None:
        """Keep the tensors of calls only for the latest signatures."""
        for known in sorted(self._table.values(), key=lambda each: each.used)[:-MAX_SHOWN]:
            known.check = None

    def decline(self, reason: Reason) -> None:
        """Count a call that cannot be identified by its arguments."""
        self.reasons[reason] += 1

    def begin_run(self) -> None:
        super().begin_run()
        self.places = set()

    def end_run(self) -> None:
        """Keep no tensors of previous calls."""
        for known in self._table.values():
            known.check = None

    def _pays(self, known: _Signature, complete: bool) -> bool:
        """Whether the last clean call may have waited for the processor: it was short, and, for a
        form that serves only until all graphs are ready, the GPU has already finished it. A no is
        final after the wanted number of clean calls.
        """
        if known.marks is None:
            return True
        problem = None
        if not complete and not gpu.is_passed(known.marks[1]):
            problem = of("on_their_way")
        elif (seconds := gpu.seconds_between(*known.marks)) > self._limit_s():
            problem = of("no_gain", seconds=f"{seconds:.1f}")
        if known.clean >= CLEAN_CALLS:
            known.refused = problem
        return problem is None

    def _count(self, graph: Any) -> None:
        super()._count(graph)
        self.regions += graph.regions
        self.places |= graph.places

    def _replay(
        self,
        graph: CapturedCall,
        book: AddressBook,
        addresses: Addresses,
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """A call's result, or None if the weights are not in place after all.

        Raises:
            CaptureError: there is no memory for it; all graphs were dropped.
        """
        if not book.hold(addresses):
            return None
        try:
            return self._computed(book.device, partial(graph.replay, addresses, tensors))
        finally:
            book.let_go(addresses)

    def _capture(
        self,
        known: _Signature,
        call: CallValues,
        rerun: Callable[..., Any],
        book: AddressBook,
        addresses: Addresses,
        ran: Collection[str],
    ) -> Any:
        """Capture this call, prove that by a previous one, and compute it by a replay; None if it
        cannot be.

        Args:
            rerun: makes the call with other arguments.
            addresses: the book's latest answer.
            ran: filled with the places that graphs have served once `rerun` has made a call.
        """
        device, check, like = call.tensors[0].device, known.check, known.like
        assert like is not None
        if missing_bytes(device) > 0:
            known.refused = of("no_room")
            return None
        marks = book.marks()
        if not book.hold(addresses):
            return None
        graph = result = None
        size = 0
        try:
            graph = CapturedCall(call, like, addresses, self._memory.on(device).pool())
            graph.prepare(rerun, call)
            before = driver.reserved_bytes(device)  # of what it holds itself, it knows the size
            graph.capture(rerun, call)
            graph.places = frozenset(ran)
            copied = any(a is not b for a, b in zip(marks, book.marks(), strict=True))
            if check is not None and not check.tells_of(book.epoch):
                check = None
            replay = partial(self._replay, graph, book, addresses)
            if not copied and is_proved(replay, check, partial(made, call, rerun, book.epoch)):
                given = replay(call.tensors)
                size = driver.reserved_bytes(device) - before
                result = given
        except (CaptureError, torch.OutOfMemoryError) as error:
            self._failed(known, error)
        finally:
            book.let_go(addresses)
            if result is None:
                book.undo(marks)
                self._drop(graph)
        if graph is None or result is None:  # the host moved weights within it, or it failed
            known.clean = 0
            return None
        known.form, known.like = known.target, None
        self._count(graph)  # its places were counted when they were captured
        graph.regions = len(known.target) if isinstance(known.target, tuple) else 0
        self._keep(known, graph, size)
        if known.graph is None:
            known.clean = -_BACK_OFF
        return result
