"""How one call of a root module is made: by a captured call where it can be, else through the
regions whose graphs are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from ..cuda_graphs.pieces import Pieces
from ..cuda_graphs.replays import Replays
from ..cuda_graphs.signatures import CallValues, arithmetic
from ..reasons import Reason
from ..weights.addresses import AddressBook
from .dispatcher import NOTHING_SERVES, Dispatcher, ForwardSet
from .faults import CAPTURES, Faults
from .pace import COMPILED, EAGER, EXACT
from .placing import Placing, unmarked
from .specializations import NOT_CALLED, CallStats


class MadeCall(NamedTuple):
    """A call that was made.

    Attributes:
        result: of the call.
        how: by graphs of regions (`COMPILED`), by replaying the host's own forward (`EXACT`), or by
            none of our code (`EAGER`); None where its time is not meaningful.
        declined: why graphs did not serve some of its blocks.
    """

    result: Any
    how: str | None
    declined: Sequence[Reason] = ()


class Step(NamedTuple):
    """How a call is to be made.

    Attributes:
        serving: the forwards that serve it.
        call: the call as data; None if that does not identify it.
        replays: captures and replays it; None if it is not to be captured.
        book: addresses of the weights that a captured call would read; None likewise.
        complete: whether no more graphs are pending.
        pieces: replays single places where the call is not replayed; None: nothing does.
        steps: of the sampler's run; None: not known.
        watch: a context within which the call is made; nothing of it is captured then.
    """

    serving: ForwardSet
    call: CallValues | None = None
    replays: Replays | None = None
    book: AddressBook | None = None
    complete: bool = True
    pieces: Pieces | None = None
    steps: int | None = None
    watch: AbstractContextManager[None] = nullcontext()


class Making:
    """Makes the calls of one root module."""

    def __init__(
        self, placing: Placing, forwards: Dispatcher, faults: Faults, account: CallStats
    ) -> None:
        """Set up with what is the root module's.

        Args:
            placing: puts forwards in place.
            forwards: what serves its calls.
            faults: what failed in our code.
            account: what its regions note.
        """
        self._placing = placing
        self._dispatcher = forwards
        self._faults = faults
        self._account = account

    def make(
        self, root: torch.nn.Module, host: Callable[..., Any], plain: Callable[[], Any], step: Step
    ) -> MadeCall:
        """Make a call.

        Args:
            host: the call as the host would make it, without its arguments.
            plain: the same with them, used where no replay gives the result.
        """
        account = self._account
        before, beside = account.calls, account.beside
        account.declined.clear()
        self._dispatcher.made_with = step.serving
        result, form = self._replayed(root, host, plain, step)
        declined = tuple(account.declined.values())
        if account.beside > beside:
            return MadeCall(result, None, declined)  # graphs computed what the host did, too
        if form is not None:
            return MadeCall(result, EXACT if form == EXACT else COMPILED, declined)
        if account.calls > before:
            return MadeCall(result, COMPILED, declined)
        if self._dispatcher.made_with.regions and not declined:
            declined = (NOT_CALLED,)
        return MadeCall(result, EAGER, declined)

    def _replayed(
        self, root: torch.nn.Module, host: Callable[..., Any], plain: Callable[[], Any], step: Step
    ) -> tuple[Any, Hashable]:
        """A replayed call's result, and the form it was captured in; None if it was not."""
        run = partial(self._placing.run, forwards=step.serving.installed)
        call, book, replays = step.call, step.book, step.replays
        attempt, compared = None, self._account.compared
        if call is None or book is None or replays is None:
            return self._in_pieces(run, plain, step), None
        ran: set[str] = set()
        if self._faults.of(CAPTURES) is None:
            attempt = self._faults.spare(
                CAPTURES,
                "replaying a step",
                replays.attempt,
                host,
                call,
                book=book,
                form=step.serving.served,
                complete=step.complete,
                runner=partial(self._within_capture, root, run, ran),
                steps=step.steps,
                ran=ran,
            )
        if attempt is None:
            return self._in_pieces(run, plain, step), None
        is_given = attempt.result is not None
        if attempt.form == EXACT if is_given else attempt.may_come and not attempt.compiled:
            self._dispatcher.made_with = NOTHING_SERVES
        if is_given:
            return attempt.result, attempt.form
        if attempt.may_come:
            result = run(plain, compiled=attempt.compiled)
        else:
            result = self._in_pieces(run, plain, step)
        is_clean = self._account.compared == compared
        settled = attempt, book, result, is_clean
        self._faults.spare(CAPTURES, "watching a step", replays.settle, *settled)
        return result, None

    def _in_pieces(self, run: Callable[..., Any], plain: Callable[[], Any], step: Step) -> Any:
        """Make a call that will not be replayed as a whole."""
        if step.pieces is None or self._faults.of(CAPTURES) is not None:
            return run(plain)
        with step.pieces.open(step.steps, (arithmetic(), step.serving.aids)):
            return run(plain)

    def _within_capture(
        self,
        root: torch.nn.Module,
        run: Callable[..., Any],
        ran: set[str],
        call: Callable[[], Any],
        *,
        compiled: bool = True,
    ) -> Any:
        """Make a call that is captured, leaving nothing behind, and note which places graphs serve
        in it.
        """
        with unmarked(root), self._dispatcher.watched(ran):
            return run(call, compiled=compiled)
