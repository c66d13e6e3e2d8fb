"""How the host runs a prompt: how it is cancelled, and what records its kernels.

Relies on the host's `comfy/model_management.py` and `comfy/model_prefetch.py`.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

#: On an error that is the host's.
_PASSES = "warmgraph_passes"


def is_interrupt(error: BaseException) -> bool:
    """Tell whether an error is the host's way to end a prompt that the user cancelled."""
    from comfy.model_management import InterruptProcessingException

    return isinstance(error, InterruptProcessingException)


def let_pass(error: BaseException) -> None:
    """Note that an error came out of the host's code within a graph: it passes, as it would without
    a graph. Too little memory is no such error: the host may need less.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        vars(error)[_PASSES] = True


def passes(error: BaseException) -> bool:
    """Tell whether `let_pass` was told of an error."""
    return _PASSES in vars(error)


def check_cancelled() -> None:
    """Raise the host's interrupt when the user pressed Cancel."""
    from comfy.model_management import throw_exception_if_processing_interrupted

    throw_exception_if_processing_interrupted()


def pause_host_compiler() -> AbstractContextManager[Any]:
    """Keep the host's own compiler (ComfyUI 0.33 and newer) from recording what runs inside.

    Its recording counts foreign allocations as faults; hosts without it have nothing to pause.
    """
    prefetch = sys.modules.get("comfy.model_prefetch")
    pause = getattr(prefetch, "pause_malloc_graph", None)
    scope = pause() if callable(pause) else None
    return scope if isinstance(scope, AbstractContextManager) else nullcontext()
