"""How a call is captured, proved and replayed.

A graph is checked before it is used: it must reproduce a previous call's result from its inputs
(`replay_check`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..reasons import Reason, of
from ..weights.addresses import AddressBook, Addresses
from . import driver
from .captured_call import CapturedCall, CaptureError, told
from .memory import CapturedMemory
from .replay_check import ReplayCheck, copies
from .signatures import CallValues, read_result

logger = logging.getLogger(__name__)

#: The driver gives a graph its memory outside of what the host can make room for.
MIN_FREE_BYTES = 2**30


class Captured(NamedTuple):
    """The outcome of capturing a call.

    Attributes:
        graph: checked, and to be counted (`CapturedMemory.add`); None if it failed, or the host
            moved weights meanwhile.
        result: of the call.
        size: bytes by which the shared memory has grown.
        problem: why it failed, if so.
        is_begun: whether it was tried at all.
    """

    graph: CapturedCall | None = None
    result: Any = None
    size: int = 0
    problem: Reason | None = None
    is_begun: bool = True


class Captures:
    """Captures calls into the memory that all graphs share."""

    def __init__(self, memory: CapturedMemory) -> None:
        """Set up.

        Args:
            memory: of all captured graphs.
        """
        self._memory = memory

    def capture(
        self,
        call: CallValues,
        like: CallValues,
        check: ReplayCheck | None,
        rerun: Callable[..., Any],
        book: AddressBook,
        addresses: Addresses,
        ran: Collection[str],
    ) -> Captured:
        """Capture a call, check the capture against a previous call, and compute it by a replay.

        Args:
            like: the form of such a call's result.
            check: a previous call of this run, if one is kept.
            rerun: makes the call with other arguments.
            book: where the root module's weights are.
            addresses: its latest answer.
            ran: filled with the places that graphs have served once `rerun` has made a call.
        """
        device = call.tensors[0].device
        if driver.free_bytes(device) < MIN_FREE_BYTES:
            return Captured(problem=of("no_room"), is_begun=False)
        marks = book.marks()
        if not book.hold(addresses):
            return Captured(is_begun=False)
        graph, done = None, Captured()
        try:
            graph = CapturedCall(call, like, addresses, self._memory.pool(device))
            graph.prepare(rerun, call)
            before = driver.reserved_bytes(device)  # of what it holds itself, it knows the size
            graph.capture(rerun, call)
            graph.places = frozenset(ran)
            copied = any(a is not b for a, b in zip(marks, book.marks(), strict=True))
            if check is not None and not check.tells_of(book.epoch):
                check = None
            make = partial(_made, call, rerun, book.epoch)
            if not copied and self._prove(graph, check, make, book, addresses):
                result = self.replay(graph, book, addresses, call.tensors)
                if result is not None:
                    done = Captured(graph, result, driver.reserved_bytes(device) - before)
        except (CaptureError, torch.OutOfMemoryError) as error:
            problem = error.reason if isinstance(error, CaptureError) else of("no_memory")
            done = Captured(problem=problem)
            logger.warning("Not captured as a CUDA graph: %s", problem)
        finally:
            book.let_go(addresses)
            if done.graph is None:
                book.undo(marks)
                if graph is not None:
                    self._memory.discard(graph, device)
        return done

    def replay(
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
            return graph.replay(addresses, tensors)
        except RuntimeError as error:  # the driver gives a graph its memory when it runs
            if "out of memory" not in str(error):
                raise
            self._memory.drop_all(book.device)
            raise CaptureError(of("no_memory")) from error
        finally:
            book.let_go(addresses)

    def _prove(
        self,
        graph: CapturedCall,
        check: ReplayCheck | None,
        make: Callable[[], ReplayCheck],
        book: AddressBook,
        addresses: Addresses,
    ) -> bool:
        """Have a graph compute a previous call; False if the weights are not in place after all.

        Args:
            check: one of this run, if any. On a difference the call is made once more, because
                weights can change in place between two calls.
            make: makes the call that is captured.

        Raises:
            CaptureError: its result differs, or there is no memory for it.
        """
        kept = check is not None
        check = make() if check is None else check
        result = self.replay(graph, book, addresses, check.inputs)
        if result is None:
            return False
        with told():
            problem = check.why_not(read_result(result).tensors)
        if problem is not None and kept:
            return self._prove(graph, None, make, book, addresses)
        if problem is not None:
            raise CaptureError(problem)
        return True


def _made(call: CallValues, rerun: Callable[..., Any], epoch: int) -> ReplayCheck:
    """Make a call on copies, as it would be made without a capture."""
    with told():
        check = ReplayCheck(call.tensors, epoch)
        args, kwargs = call.over(copies(call.tensors))
        check.gave(read_result(rerun(*args, **kwargs)).tensors)
    return check
