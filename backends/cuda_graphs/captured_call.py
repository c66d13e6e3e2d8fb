"""One call in a CUDA graph: captured once, replayed on other tensors of the same sizes.

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs

Memory that is allocated within a capture must be freed within it: under `cudaMallocAsync` a later
free ends the process. So nothing that ran may outlive the capture, neither local variables nor the
frames of a traceback.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..device.gpu import is_capturing
from ..host_api.dynamic_vram import no_page_taken
from ..host_api.execution import is_interrupt
from ..reasons import Reason, of
from ..weights.addresses import Addresses
from . import driver, streams
from .capture_gate import CAPTURE_GATE
from .constants import Constants
from .signatures import CallValues, CaptureError, read_result
from .skip_joins import QuickJoins

#: For constants, which are small: tables of frequencies.
_CONSTANT_BYTES = 2**16

#: A capture that only what this thread does may break.
THREAD = "thread_local"
_FOREIGN_CAPTURE = of("foreign_capture")


class _Ours(threading.local):
    """Whether this thread captures one of our calls."""

    def __init__(self) -> None:
        self.captures = False


_ours = _Ours()


def is_ours() -> bool:
    """Tell whether what runs in this thread is being captured by `CapturedCall.capture`."""
    return _ours.captures


def foreign_capture(device: torch.device) -> Reason | None:
    """Say that another capture, not ours, is under way: then we must not allocate, compare or load,
    which would break it.
    """
    return _FOREIGN_CAPTURE if not _ours.captures and is_capturing(device) else None


class CapturedCall:
    """A captured call. Inputs are copied in, outputs are copied out: a caller may keep them."""

    def __init__(self, call: CallValues, like: CallValues, addresses: Addresses, pool: Any) -> None:
        """Make the static inputs and outputs; nothing is captured yet.

        Args:
            call: whose tensors give the sizes.
            like: the form of such a call's result (`signatures.result_form`).
            addresses: where the weights are.
            pool: of `torch.cuda.graph_pool_handle`; captured calls share their temporary memory.
        """
        #: How many calls of regions lie in it.
        self.regions = 0
        #: The places whose graphs it holds.
        self.places: frozenset[str] = frozenset()
        # Weights of the old way are not kept: the host may load the model anew.
        self._addresses = addresses if addresses.pages is not None else addresses._replace(loose=[])
        self._refreshed = self._addresses
        self._pool = pool
        self.device = call.tensors[0].device
        self._stream: Any = None
        self._own: streams.OwnStream | None = None
        self._graph: Any = driver.make_graph(self.device)
        with torch.inference_mode(False):  # else they could be written in inference mode only
            self._inputs = [torch.empty_like(tensor) for tensor in call.tensors]
            self._outputs = [torch.empty_like(t, device=self.device) for t in like.tensors]
        self._result = like
        # Taken now, since it could not be had within a capture.
        self._kept = torch.empty(_CONSTANT_BYTES, dtype=torch.uint8, pin_memory=True)

    def prepare(self, run: Callable[..., Any], call: CallValues) -> None:
        """Find a stream to capture on, where libraries have all the memory that the call needs.

        Some allocate it only once `run(*args, **kwargs)` ran there; its result is dropped.

        Raises:
            CaptureError: the call does what cannot be captured, or there is no memory.
            The host's interrupt, when the user cancelled meanwhile.
        """
        with told():
            if not self._addresses.takes_memory_by_stream:
                self._stream = streams.shared(self.device)
                return
            self._own = streams.OWN.take(self.device)
            self._stream = self._own.stream
            args, kwargs = call.over(call.tensors)
            streams.rehearse(self._own, self.device, partial(run, *args, **kwargs))

    def capture(self, run: Callable[..., Any], call: CallValues) -> None:
        """Capture `run(*args, **kwargs)` over the static inputs; computes nothing.

        To be called once, after `prepare`; raises what that raises.
        """
        with told():
            torch.cuda.synchronize(self.device)
            with torch.cuda.stream(self._stream), undisturbed(self.device):
                self._graph.capture_begin(pool=self._pool, capture_error_mode=THREAD)
                try:
                    with capturing():
                        self._record(run, call)
                except BaseException as error:
                    forget_frames(error)
                    with contextlib.suppress(RuntimeError):  # says only that it was broken off
                        self._graph.capture_end()
                    raise
                self._graph.capture_end()

    @property
    def own_bytes(self) -> int:
        """GPU memory of its inputs and outputs, and of libraries for its stream."""
        tensors = sum(tensor.nbytes for tensor in (*self._inputs, *self._outputs))
        return tensors + (0 if self._own is None else self._own.held_bytes)

    def fits(self, addresses: Addresses) -> bool:
        """Tell whether the weights are where this graph reads them, or can be put there."""
        if addresses is self._refreshed:
            return True
        mine = self._addresses
        if mine.pages is None or addresses.pages is None:
            return mine.pages is addresses.pages and mine.pointers == addresses.pointers
        return mine.places <= addresses.places and list(map(_geometry, mine.loose)) == list(
            map(_geometry, addresses.loose)
        )

    def replay(self, addresses: Addresses, tensors: Sequence[torch.Tensor]) -> Any:
        """Compute on live inputs; the result is the caller's own.

        Args:
            addresses: where the weights are; `fits` said yes, and their pages are held.
            tensors: the inputs, in the order of `CallValues.tensors`.
        """
        if addresses.pages is not None and addresses is not self._refreshed:
            with torch.inference_mode():
                for kept, live in zip(self._addresses.loose, addresses.loose, strict=True):
                    if kept is not live:
                        kept.copy_(live)
            self._refreshed = addresses
        _copy(tensors, self._inputs)
        self._graph.replay()
        return self._result.over([static.clone() for static in self._outputs])[0][0]

    def free(self) -> list[Any]:
        """Give its memory back; it cannot be replayed any more."""
        torch.cuda.synchronize(self.device)  # it may still run
        self._inputs, self._outputs = [], []
        graph, self._graph = self._graph, None
        if self._own is not None:
            streams.OWN.give_back(self.device, self._own)
            self._own = None
        return [] if graph is None else [graph]

    def _record(self, run: Callable[..., Any], call: CallValues) -> None:
        """Run the call; every tensor that it makes is gone when this returns."""
        args, kwargs = call.over(self._inputs)
        with QuickJoins(), Constants(self._kept):
            result = run(*args, **kwargs)
        _copy(read_result(result).tensors, self._outputs)


@contextlib.contextmanager
def capturing(is_so: bool = True) -> Iterator[None]:
    """Have what runs inside know that it is captured by us, or that it is not."""
    before, _ours.captures = _ours.captures, is_so
    try:
        yield
    finally:
        _ours.captures = before


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Raise what goes wrong as `CaptureError`, in words."""
    try:
        yield
    except Exception as error:  # whatever the call raises now, it did not when it ran
        if is_interrupt(error):
            raise
        raise CaptureError(why_not(error)) from error


def why_not(error: Exception) -> Reason:
    """Say why a call was not captured, by what it raised then."""
    if isinstance(error, torch.OutOfMemoryError):
        return of("no_memory_capturing")
    if isinstance(error, CaptureError):
        return error.reason
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return of("cannot_capture", error=text[:200])


def _copy(tensors: Sequence[torch.Tensor], statics: Sequence[torch.Tensor]) -> None:
    for static, tensor in zip(statics, tensors, strict=True):
        static.copy_(tensor, non_blocking=True)


def forget_frames(error: BaseException) -> None:
    """Clear the local variables of all frames that an error came through."""
    known: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in known:
            known.add(id(one))
            traceback.clear_frames(one.__traceback__)
            pending += [one.__cause__, one.__context__]


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Prevent what would end a capture on a device from outside: what ends any capture
    (`capture_gate`), and the host's eviction of a model's pages.
    """
    with CAPTURE_GATE.capture(alone=driver.is_driver_allocator()), no_page_taken(device):
        yield


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype
