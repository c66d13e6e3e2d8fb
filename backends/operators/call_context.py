"""What the operators of a region's graph read while a call of it is computed.

The call's own side sets it (`using`), the operators read it (`now`); each thread has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from ..reasons import Reason

#: What names of Warmgraph's operators begin with.
NAMESPACE = "warmgraph"
#: (weight, bias) of layers, by their paths.
Given = Mapping[str, tuple[Any, Any]]


class Caller(Protocol):
    """Calls a layer, in a quicker way where it knows one (`Int8Products`)."""

    def call(self, layer: torch.nn.Module, input: torch.Tensor) -> torch.Tensor:
        """Return what `layer(input)` would."""

    def multiply(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: str = ""
    ) -> torch.Tensor:
        """Return what `linear(input, weight, bias)` would, of the input after an activation if one
        is named.
        """

    def multiply_several(
        self, input: torch.Tensor, layers: Sequence[tuple[Any, Any]], act: str = ""
    ) -> Sequence[torch.Tensor]:
        """Return what `multiply` would by each (weight, bias), in memory of its own."""


class Choice(Protocol):
    """Chooses the kernel where the host would take PyTorch's own (`AttentionChoice`)."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        heads: int,
        *,
        split: bool,
        calls: int,
        host: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Compute it, by `host` or otherwise; a step makes about so many such `calls`."""


class Recorder(Protocol):
    """Records what runs in this thread, to be repeated without its Python."""

    def stand_apart(
        self, run: Callable[..., Any], fake: Callable[..., Any], args: Any, why: Reason
    ) -> Any:
        """Return what `run(*args)` gives, which is to be called anew at each repetition.

        Args:
            fake: gives a result like it which holds nothing.
            why: what is recorded cannot hold it.
        """


class CallRecord(Protocol):
    """Keeps how parts that are others' code were called (`RecordedCall`)."""

    def call(
        self, path: str, given: Sequence[torch.Tensor], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return what `compute()` gives, once what it was given is kept."""


class CallContext(NamedTuple):
    """What one call goes by; with nothing set, no region is computed.

    Attributes:
        options: the block's `transformer_options`, the very ones.
        arguments: what the block brings along for its attention, by name (`live_arguments`), and
            in the place of parts, by path.
        module: the region's; None in a worker.
        caller: calls its layers; None leaves that to the operator.
        given: what those of its layers are multiplied by that need not be called.
        others: paths of its parts that are others' code, for which nothing is given.
        record: keeps how these were called, where the graph is compared.
        choice: takes one of PyTorch's attention kernels; None leaves that to the host.
        calls: about how many calls like this one a step makes.
        recorder: gets what cannot be recorded.
        layers_attend: a block is traced that has parts which may name an attention of their own.
    """

    options: dict[str, Any] | None = None
    arguments: Mapping[str, Any] | None = None
    module: torch.nn.Module | None = None
    caller: Caller | None = None
    given: Given = MappingProxyType({})
    others: Collection[str] = ()
    record: CallRecord | None = None
    choice: Choice | None = None
    calls: int = 1
    recorder: Recorder | None = None
    layers_attend: bool = False


class _Thread(threading.local):
    context = CallContext()


#: Two copies of this pack in one process share their operators (`registering`), and so this.
_thread: _Thread = getattr(torch.ops, NAMESPACE).__dict__.setdefault("call_context", _Thread())


def now() -> CallContext:
    """Return what a call goes by in this thread."""
    return _thread.context


def options_of_step() -> dict[str, Any]:
    """Return the `transformer_options` of the block that is computed, the very ones."""
    options = now().options
    return {} if options is None else options


class using:  # noqa: N801, no generator: it is entered for each block
    """Until this ends, have operators read these fields; the others stay."""

    __slots__ = ("_before", "_context")

    def __init__(self, context: CallContext | None = None, **fields: Any) -> None:
        """Set up.

        Args:
            context: all fields, from a caller to whom time counts.
            fields: of `CallContext`.
        """
        self._context = _thread.context._replace(**fields) if context is None else context

    def __enter__(self) -> None:
        self._before, _thread.context = _thread.context, self._context

    def __exit__(self, *_: object) -> None:
        _thread.context = self._before
