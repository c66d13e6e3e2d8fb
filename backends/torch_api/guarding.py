"""What a traced call depends on: Dynamo's guards, and the code that ran.

Sources: torch/_dynamo/eval_frame.py, guards.py and source.py of torch 2.10-2.15. A guard's name is
an expression over the call's locals `L` and globals `G`.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def trace(
    forward: Callable[..., Any],
    block: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[list[Any], list[types.CodeType]]:
    """Return the guards of a block's call on fakes, and the code that ran. For a worker: it forgets
    all earlier traces in this process.

    Raises:
        Whatever the code or torch raises: it cannot be traced whole.
    """
    import torch._dynamo as dynamo
    from torch._guards import TracingContext
    from torch.utils._python_dispatch import _disable_current_modes

    guards: list[Any] = []
    traced: list[types.CodeType] = []

    def backend(module: Any, _inputs: Any) -> Any:
        traced.extend(TracingContext.get_traced_code() or ())
        return module.forward

    settings: Any = {"specialize_int": True, "specialize_float": True}
    dynamo.reset()
    try:
        with dynamo.config.patch(**settings), _disable_current_modes():
            scope = {"__builtins__": builtins}  # where a trace leaves names
            called = types.FunctionType(_called.__code__, scope)
            run = dynamo.optimize(backend, nopython=True, guard_export_fn=guards.extend)(called)
            run(forward, block, args, kwargs)
    finally:
        dynamo.reset()
    return guards, traced


def is_taken_whole(function: Callable[..., Any]) -> bool:
    """Tell whether tracing was told to take a function's result without its code.

    Sources: torch/_dynamo/decorators.py (`allow_in_graph`, `nonstrict_trace`), torch/compiler
    (`assume_constant_result`).
    """
    from torch._dynamo import trace_rules

    return (
        bool(getattr(function, "_dynamo_marked_constant", False))
        or trace_rules.is_callable_allowed(function)
        or trace_rules.is_nonstrict_trace_callable(function)
    )


def _called(forward: Any, block: Any, args: Any, kwargs: Any) -> Any:
    return forward(block, *args, **kwargs)
