"""Stands for CUDA graphs where there is no GPU: what is captured is recorded operator by operator,
and done once more on the same memory at each replay. What it does on the processor alone is not.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from warmgraph_backends.cuda_graphs import capture_table, piece, pieces
from warmgraph_backends.cuda_graphs.streams import OwnStreams
from warmgraph_backends.operators.call_context import now, using
from warmgraph_backends.sessions.start import Starter

from . import made_up_compiler


def on_replay() -> None:
    """Called before each replay."""


class RecordedGraph:
    """One graph."""

    #: How many were begun and replayed since `use`.
    begun = replayed = 0
    #: The one that is captured.
    now: RecordedGraph | None = None

    def __init__(self) -> None:
        self.done: list[tuple[Callable[..., Any], Any, Any, list[torch.Tensor], Any]] = []
        self._is_done = True  # in place of the first replay: a recording computes

    def capture_begin(self, **_: Any) -> None:
        assert RecordedGraph.now is None
        RecordedGraph.begun += 1
        RecordedGraph.now = self

    def capture_end(self) -> None:
        assert RecordedGraph.now is self
        RecordedGraph.now = None

    def replay(self) -> None:
        RecordedGraph.replayed += 1
        on_replay()
        if self._is_done:
            self._is_done = False
            return
        for func, args, kwargs, made, given in self.done:
            with using(given=given):
                fresh = _tensors(func(*args, **kwargs))
            for kept, again in zip(made, fresh, strict=True):
                if kept is not again and not _shares(kept, again):
                    kept.copy_(again)

    def reset(self) -> None:
        self.done = []


def _called(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do something, and record it, if no operator of ours has ended the graph within it."""
    graph = RecordedGraph.now
    result = func(*args, **kwargs)
    if graph is not None and RecordedGraph.now is graph:
        # Kernels read the weights that a layer was multiplied by when they were captured.
        given = now().given
        graph.done.append((func, args, kwargs, _tensors(result), given))
    return result


class _Names:
    """PyTorch, whose operators are recorded."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if isinstance(found, torch._ops.OpOverload):
            return partial(_called, found)
        inner = found is torch.ops or isinstance(found, (_Namespace, torch._ops.OpOverloadPacket))
        return _Names(found) if inner else found


_Namespace = type(torch.ops.aten)


class Recorded(made_up_compiler.Traced):
    """Its graphs run operator by operator, and a recording sees each."""

    def load(self, payload: bytes, card: int | None = None) -> Callable[[list[Any]], Any]:
        call = super().load(payload)
        names = call.__closure__[0].cell_contents  # type: ignore[index]
        names["torch"] = _Names(torch)
        return call


class Listing:
    """Records nothing, and lists what a graph could not hold."""

    def __init__(self) -> None:
        self.cuts: Counter[str] = Counter()

    def stand_apart(self, run: Any, fake: Any, args: Any, why: str) -> Any:
        self.cuts[why] += 1
        return run(*args)


def cuts(run: Callable[[], Any]) -> Counter[str]:
    """What would cut the places that are called meanwhile, by reason."""
    listing = Listing()
    with using(recorder=listing):
        run()
    return listing.cuts


class _Stream:
    device = torch.device("cpu")

    def wait_stream(self, other: Any) -> None: ...


class Gpu:
    """A device that waits for the processor, or has work for long."""

    is_idle = True
    #: How long each place's work takes.
    seconds = 0.0

    @staticmethod
    def mark(device: Any) -> str:
        return "a mark"

    @staticmethod
    def is_passed(mark: Any) -> bool:
        return Gpu.is_idle

    @staticmethod
    def seconds_between(begin: Any, end: Any) -> float:
        return Gpu.seconds

    @staticmethod
    def current_stream(device: Any) -> _Stream:
        return _Stream()

    @staticmethod
    def on_stream(stream: Any) -> Any:
        return contextlib.nullcontext()

    @staticmethod
    def synchronize(device: Any) -> None: ...


class _Driver:
    free_bytes = staticmethod(lambda device: 2**40)
    reserved_bytes = staticmethod(lambda device: 0)
    is_driver_allocator = staticmethod(lambda: False)
    make_graph = staticmethod(lambda device: RecordedGraph())


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, have places be captured here, and no whole call."""
    monkeypatch.setattr(pieces, "gpu", Gpu)
    monkeypatch.setattr(pieces, "driver", _Driver)
    monkeypatch.setattr(capture_table, "driver", _Driver)
    monkeypatch.setattr(piece, "gpu", Gpu)
    monkeypatch.setattr(piece, "leave", partial(_called, piece.leave))
    monkeypatch.setattr(pieces.streams, "shared", lambda device: _Stream())
    monkeypatch.setattr(pieces.streams, "make_workspaces", lambda stream, device: None)
    monkeypatch.setattr(pieces.streams, "OWN", OwnStreams(lambda device: _Stream()))
    monkeypatch.setattr(pieces.streams, "rehearse", lambda own, device, run: run())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(Starter, "_may_capture", lambda self, attached: True)
    monkeypatch.setattr(Starter, "_replays", lambda self, attached: None)
    monkeypatch.setattr(RecordedGraph, "begun", 0)
    monkeypatch.setattr(RecordedGraph, "replayed", 0)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (list, tuple)):
        return [each for item in value for each in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
