"""How the host runs a prompt: cancelling, and what records its kernels.

Relies on the host's `comfy/model_management.py` and `comfy/model_prefetch.py`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

#: On an error that is the host's.
_PASSES = "warmgraph_passes"


def is_interrupt(error: BaseException) -> bool:
    """Tell whether an error is the host's cancelling of a prompt."""
    from comfy.model_management import InterruptProcessingException

    return isinstance(error, InterruptProcessingException)


def let_pass(error: BaseException) -> None:
    """Mark an error of the host's code within a graph: it is raised as it would be without a graph.
    Except out of memory: the host may need less.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        vars(error)[_PASSES] = True


def passes(error: BaseException) -> bool:
    """Tell whether `let_pass` marked an error."""
    return _PASSES in vars(error)


def check_cancelled() -> None:
    """Raise the host's interrupt if the user cancelled."""
    _management().throw_exception_if_processing_interrupted()


@functools.cache
def _management() -> Any:
    """The host's module, cached: importing costs a microsecond at each place."""
    import comfy.model_management

    return comfy.model_management


def executing_node() -> str | None:
    """Return the id of the node that runs in this thread, or None."""
    context = _executing()
    return None if context is None else str(context.node_id)


def executing_prompt() -> str | None:
    """Return the id of the prompt that runs in this thread, or None."""
    context = _executing()
    return None if context is None else str(context.prompt_id)


def _executing() -> Any:
    try:
        from comfy_execution.utils import get_executing_context
    except ImportError:
        return None
    return get_executing_context()


class _Paused(threading.local):
    """The host's recordings that we pause, in this thread."""

    def __init__(self) -> None:
        self.now: tuple[Any, ...] = ()


_paused = _Paused()
_UNKNOWN = object()
_NOTHING = contextlib.nullcontext()


def pause_host_compiler() -> AbstractContextManager[None]:
    """Keep the host's own compiler (0.33 and newer) from recording what runs inside: it counts
    foreign allocations as faults. Nested pauses are one, since the host would resume at the inner
    end.
    """
    recording = _recording()
    if recording is None or recording in _paused.now:
        return _NOTHING
    return _pausing(recording)


@contextlib.contextmanager
def _pausing(recording: Any) -> Iterator[None]:
    before, _paused.now = _paused.now, (*_paused.now, recording)
    try:
        with sys.modules["comfy.model_prefetch"].pause_malloc_graph():
            yield
    finally:
        _paused.now = before


def _recording() -> Any:
    """The host's recording in this thread; None if none; our own object if it does not say."""
    prefetch = sys.modules.get("comfy.model_prefetch")
    if prefetch is None or not callable(vars(prefetch).get("pause_malloc_graph")):
        return None  # asked at each place, where `getattr` of what is not there takes longer
    graphs = getattr(prefetch, "MALLOC_GRAPHS", None)
    if not isinstance(graphs, dict):
        return _UNKNOWN
    graph = graphs.get(threading.get_ident())
    return graph if getattr(graph, "_comfy_active", False) else None
