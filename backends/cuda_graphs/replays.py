"""Which calls of a root module are replayed from CUDA graphs, and when they are captured.

A call whose signature (`signatures.CallValues.key`) came twice before is captured, and replayed
from then on. A signature that came once may never repeat, and its first call includes one-time
work. Once is enough if calls of this module were captured before and the run has enough steps left,
as for a prompt of another length. There are two sorts of captures: the host's own forward, bit for
bit (*exact*), while graphs of regions are pending; and the forward with all regions compiled, once
they are ready.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from ..device import gpu
from ..host_api.execution import check_cancelled
from ..reasons import NOTHING, Reason, of
from ..weights.addresses import AddressBook, Addresses
from .captured_call import CapturedCall, CaptureError
from .captures import Captures
from .memory import CapturedMemory
from .replay_check import ReplayCheck, copies, may_be_kept
from .signatures import CallValues, FixedCallError, read_result, result_form

#: Calls of one signature that run by themselves before it is captured.
CLEAN_CALLS = 2
#: Steps that a run must have left, the one that is captured among them, for a call that came once.
STEPS_LEFT = 4
EXACT = "exact"
#: Signatures that are remembered.
MAX_SIGNATURES = 64
#: Signatures of which a call is kept that was made.
MAX_SHOWN = 8
#: Further clean calls that a signature needs after its graph was dropped for lack of room.
_BACK_OFF = 8


class Runner(Protocol):
    """Runs one call of the root module, through the regions' graphs or without them."""

    def __call__(self, call: Callable[[], Any], *, compiled: bool = True) -> Any: ...


@dataclass
class _Signature:
    """What is known of one signature."""

    #: The form to capture, how many clean calls were made since it is, and why not, if not.
    target: Hashable = None
    clean: int = 0
    refused: Reason | None = None
    #: The form of what a call gave.
    like: CallValues | None = None
    #: The last call of this run that was made, by which a capture is proved.
    check: ReplayCheck | None = None
    #: Marks on the GPU around the last clean call.
    marks: tuple[Any, Any] | None = None
    #: What is captured, and in which form.
    graph: CapturedCall | None = None
    form: Hashable = None


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


class Replays:
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
        self._memory = memory
        self._captures = Captures(memory)
        self._limit_s = limit_s
        self._signatures: dict[Hashable, _Signature] = {}
        self._calls_in_run = 0
        self.captures = 0
        self.replayed = 0
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
        runner: Runner,
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
            runner: makes the call while it is captured.
            steps: of the sampler's run, each of which makes one call or more; None: not known.
            ran: filled with the places that graphs have served once `runner` has made a call.

        Raises:
            The host's interrupt, when the user cancelled.
        """
        check_cancelled()
        left = 0 if steps is None else steps - self._calls_in_run
        self._calls_in_run += 1
        needed = 1 if self.captures and left >= STEPS_LEFT else CLEAN_CALLS
        target = form if complete else EXACT
        known = self._known(call.key)
        if known.target != target:
            known.target, known.clean, known.refused = target, 0, None
        addresses = book.look()
        graph, made = known.graph, known.form
        result = None
        if addresses is None:
            self.reasons[book.problem or NOTHING] += 1
        elif graph is not None and (
            known.form == target or (known.refused and known.form == EXACT)
        ):
            if not graph.fits(addresses):
                self._memory.drop(graph)
            else:
                try:
                    result = self._captures.replay(graph, book, addresses, call.tensors)
                except CaptureError as error:
                    known.refused = error.reason
                if result is not None:
                    self._count(graph)
        elif known.like is not None and known.clean >= needed and self._pays(known, complete):
            rerun, made = partial(_rerun, runner, host, compiled=complete), target
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
        form = None if result is None else made
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
                        known.check.gave(given)
            except FixedCallError as error:
                known.refused = error.reason
        if known.refused is not None:
            self.reasons[known.refused] += 1

    def _keep_few(self) -> None:
        """Keep the tensors of calls only for the latest signatures."""
        for known in list(self._signatures.values())[:-MAX_SHOWN]:
            known.check = None

    def decline(self, reason: Reason) -> None:
        """Count a call that cannot be identified by its arguments."""
        self.reasons[reason] += 1

    def _known(self, key: Hashable) -> _Signature:
        known = self._signatures.pop(key, None)
        if known is not None:
            self._signatures[key] = known  # the last one used
        else:
            while len(self._signatures) >= MAX_SIGNATURES:
                oldest = next(iter(self._signatures))
                if (graph := self._signatures.pop(oldest).graph) is not None:
                    self._memory.drop(graph)
            known = self._signatures[key] = _Signature()
        return known

    def begin_run(self) -> None:
        """Try again in a new run what had no room in the last one."""
        self._calls_in_run = 0
        self.places = set()
        for known in self._signatures.values():
            if known.refused is not None and known.refused.retry:
                known.refused = None

    def end_run(self) -> None:
        """Keep no tensors of previous calls."""
        for known in self._signatures.values():
            known.check = None

    def forget(self, graph: CapturedCall, *, crowded: bool) -> None:
        """A graph's memory was freed; its signature is captured again when it repeats, or only when
        it repeats often if another graph needed the room.
        """
        for known in self._signatures.values():
            if known.graph is graph:
                known.graph = None
                if crowded:
                    known.clean = -_BACK_OFF

    def drop(self) -> None:
        """Free all memory and forget every signature."""
        for known in list(self._signatures.values()):
            if known.graph is not None:
                self._memory.drop(known.graph)
        self._signatures.clear()

    @property
    def captured(self) -> int:
        """How many signatures have a graph now."""
        return sum(known.graph is not None for known in list(self._signatures.values()))

    @property
    def vram_bytes(self) -> int:
        """VRAM that all captured graphs of the process hold; most of it is shared."""
        return self._memory.used_bytes

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

    def _count(self, graph: CapturedCall) -> None:
        """Note that a graph has computed a call."""
        self._memory.note_use(graph)
        self.replayed += 1
        self.regions += graph.regions
        self.places |= graph.places

    def _capture(
        self,
        known: _Signature,
        call: CallValues,
        rerun: Callable[..., Any],
        book: AddressBook,
        addresses: Addresses,
        ran: Collection[str],
    ) -> Any:
        """Capture this call, and compute it by a replay; None if it cannot be."""
        assert known.like is not None
        captured = self._captures.capture(
            call, known.like, known.check, rerun, book, addresses, ran
        )
        if captured.problem is not None:
            known.refused = captured.problem
        graph = captured.graph
        if graph is None:
            if captured.is_begun:  # the host moved weights within it, or it failed
                known.clean = 0
            return None
        device = call.tensors[0].device
        self.captures += 1
        worse = known.graph
        known.graph, known.form, known.like = graph, known.target, None
        self._count(graph)  # its places were counted when they were captured
        graph.regions = len(known.target) if isinstance(known.target, tuple) else 0
        known.refused = self._memory.add(graph, self, device, captured.size)
        if worse is not None:  # because its card has another one
            self._memory.drop(worse)
        if not self._memory.holds(graph):
            known.clean = -_BACK_OFF
        return captured.result


def _rerun(
    runner: Runner, host: Callable[..., Any], *args: Any, compiled: bool, **kwargs: Any
) -> Any:
    return runner(partial(host, *args, **kwargs), compiled=compiled)
