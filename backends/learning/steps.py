"""Steps of a model without data: the host's own code on fakes, at any sizes and in any dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..code.packs import foreign_class
from ..errors import LearnError
from ..plans.plan import FORWARD, Placed
from ..reasons import of
from ..torch_api.fakes import (
    asks_for_values,
    errors_unsaid,
    memory_of,
    modules_stay,
    sized_fakes,
)
from ..torch_api.known_values import KnownValues
from .arguments import Spot, WatchedCall
from .blocks import mark
from .calls import NotedCall, by_position
from .notes import Listener, Notes
from .options import ReadOptions, Reads
from .reads import BlockReads, read_by
from .standing import Standing
from .values import OPTIONS
from .watching import Seen, Watcher


class FakeCall(Seen):
    """One call of a block on fakes.

    Attributes:
        writes: the leaves that it writes into.
        attends: how (`notes`).
        reads: what of its step's options.
        known: what of all this counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[int] = []
        self.attends = ""
        self.reads = Reads()
        self.known = BlockReads()


class MetaModel:
    """A root module on fakes."""

    def __init__(
        self, make: Callable[[torch.dtype], torch.nn.Module], dtype: str, listener: Listener
    ) -> None:
        """Build it.

        Args:
            make: builds the host's module, in a dtype that it computes in.
            dtype: that one.
            listener: notes what its blocks compute.

        Raises:
            LearnError: it cannot be built without data, or is another pack's.
        """
        self.dtype = dtype
        self._mode, self._values = sized_fakes(), KnownValues()
        try:
            with self.fakes():
                self.root = make(getattr(torch, dtype))
        except Exception as error:  # the host's code, of any version
            raise _failed(error) from error
        if (owner := foreign_class(type(self.root))) is not None:
            raise LearnError(owner)
        self._watcher = _Steps(self.root, listener)
        self.blocks = self._watcher.blocks
        if not self.blocks:
            raise LearnError(of("learned_no_blocks", model=type(self.root).__name__))

    def mark(self, name: str) -> str:
        """Return a value that is equal for blocks that compute the same."""
        return self._watcher.marks[name]

    @contextlib.contextmanager
    def fakes(self) -> Iterator[None]:
        """Until this ends, tensors are this twin's fakes."""
        with self._mode, self._values, torch.no_grad(), errors_unsaid(), modules_stay():
            yield

    def step(
        self,
        call: WatchedCall,
        sizes: Mapping[Spot, int] | None = None,
        *,
        trying: bool = False,
        is_placed: bool = True,
    ) -> dict[str, list[FakeCall]]:
        """Make a step; returns the calls of each block.

        Args:
            call: the watched one.
            sizes: that are changed.
            trying: whether to find out what counts.
            is_placed: whether the blocks are watched.

        Raises:
            LearnError: it cannot be made without data.
        """
        with self.fakes(), _put_back(self.root):
            try:
                args, kwargs = call.make(sizes or {}, self.dtype)
                placed = self._watcher.placed() if is_placed else []
                return self._watcher.step(call.method, args, kwargs, placed, trying=trying)
            except LearnError:
                raise
            except Exception as error:  # the host's code, of any version
                raise _failed(error) from error

    def looks(self, call: WatchedCall) -> bool:
        """Tell whether the model's step differs once its blocks' forwards are replaced, apart from
        what differs from step to step anyway.
        """
        streams = []
        for is_placed in (True, True, False):
            with self._watcher.listener.noting() as notes:
                self.step(call, is_placed=is_placed)
            streams.append(notes.stream)
        return len({*map(len, streams)}) == 1 and any(
            one == other != plain for one, other, plain in zip(*streams, strict=True)
        )


class _Steps(Watcher):
    """Makes steps and watches them."""

    def __init__(self, root: torch.nn.Module, listener: Listener) -> None:
        super().__init__(root)
        self.listener = listener
        self._trying = False
        #: By what a block is: calls, with what counts there; equal ones are traced once.
        self._known: dict[str, list[tuple[NotedCall, dict[str, Any], BlockReads]]] = {}
        self.marks = {name: mark(block) for name, block in self.blocks.items()}

    def step(
        self, method: str, args: Any, kwargs: Any, placed: Sequence[Placed], *, trying: bool
    ) -> dict[str, list[Any]]:
        """Make one, by a method of the root, with these forwards in place."""
        self.seen, self._trying = {}, trying
        for block, name, forward in placed:
            block.__dict__[name] = forward
        try:
            with self.listener.operators():
                getattr(type(self.root), method)(self.root, *args, **kwargs)
        finally:
            for block in self.blocks.values():
                block.__dict__.pop(FORWARD, None)
        return self.seen

    def _new(self) -> Seen:
        return FakeCall()

    def _make(self, name: str, block: torch.nn.Module, seen: Seen, own: Callable[[], Any]) -> Any:
        assert isinstance(seen, FakeCall)
        if seen.call is None:
            return self._of_block(block, own)
        reads, named = Reads(), seen.call.named
        forward = type(block).forward

        def run() -> Any:
            args, kwargs = by_position(forward, {n: _told(n, v, reads) for n, v in named.items()})
            return forward(block, *args, **kwargs)

        try:
            notes, result = self._noted(block, run)
            self.listener.notes.stream += notes.stream
        except LearnError as error:
            if isinstance(error, _ReadsDataError):
                raise
            seen.object_to(error.reason)
            return self._of_block(block, own)
        try:
            if self._trying and seen.problem is None:
                seen.known = self._known_of(name, block, seen.call, reads)
                given = named.get(OPTIONS, {})
                unseen = reads.unseen(seen.known.options)
                if any(not isinstance(given.get(each), torch.Tensor) for each in unseen):
                    seen.object_to(of("learned_all_options"))
            seen.attends, seen.reads = notes.attends, reads
            seen.writes = seen.call.written(notes.written)
        except LearnError as error:
            seen.object_to(error.reason)
        if notes.written & {memory_of(each) for each in block.parameters()}:
            seen.object_to(of("learned_settings"))
        if notes.is_random:
            seen.object_to(of("learned_random"))
        return result

    def _known_of(
        self, name: str, block: torch.nn.Module, call: NotedCall, reads: Reads
    ) -> BlockReads:
        """What counts of a call, checked with all else changed."""
        before = self._known.setdefault(self.marks[name], [])
        for other, values, known in before:
            if known.counting(other, values) == known.counting(call, reads.values):
                return known
        known = read_by(block, call)
        before.append((call, reads.values, known))
        return known

    def _noted(self, block: torch.nn.Module, run: Callable[[], Any]) -> tuple[Notes, Any]:
        with self.listener.noting() as notes:
            return notes, self._of_block(block, run)

    def _of_block(self, block: torch.nn.Module, run: Callable[[], Any]) -> Any:
        """Run a block's code; code that reads values is named."""
        try:
            return run()
        except Exception as error:
            if asks_for_values(error):
                raise _ReadsDataError(type(block).__name__) from error
            raise


def _told(name: str, value: Any, reads: Reads) -> Any:
    """An argument whose options note their reads."""
    if name == OPTIONS and isinstance(value, dict):
        return ReadOptions(value, reads)
    if type(value) is dict:
        return {key: _told(key, each, reads) for key, each in value.items()}
    return value


class _ReadsDataError(LearnError):
    """Code goes on by what is in tensors."""

    def __init__(self, name: str) -> None:
        super().__init__(of("learned_reads_data", name=name))


def _failed(error: Exception) -> LearnError:
    if asks_for_values(error):
        return _ReadsDataError(_where(error))
    line = next(iter(str(error).splitlines()), "")[:160]
    return LearnError(of("learned_no_step", sort=type(error).__name__, error=line))


def _where(error: BaseException) -> str:
    """The name of the host function that was running."""
    name, trace = "the model", error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.startswith("comfy."):
            name = trace.tb_frame.f_code.co_name
        trace = trace.tb_next
    return name


@contextlib.contextmanager
def _put_back(root: torch.nn.Module) -> Iterator[None]:
    """Restore what a step sets in a model's parts."""
    before = Standing(root.modules())
    try:
        yield
    finally:
        before.put_back()
