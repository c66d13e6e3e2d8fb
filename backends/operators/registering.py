"""Our operators, which graphs call by name, registered once in a process.

A process may hold two copies of this pack (one installed twice, say), and torch knows one operator
of a name: the second copy takes the first one's, with its state.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

from ..host_api.execution import let_pass
from ..kinds.layout import CONTIGUOUS, memory_format
from ..reasons import Reason
from ..torch_api import turns
from .call_context import NAMESPACE as NAMESPACE
from .call_context import now

State = TypeVar("State")

#: Where an operator keeps what belongs to it.
_STATE, _LIBRARY = "warmgraph_state", "warmgraph_library"


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    state: State,
    why_apart: Callable[..., Reason | None] | None = None,
) -> tuple[Any, State]:
    """Make an operator that computes by `run` on every device, and by `fake` where it is traced.

    Args:
        schema: "name(Tensor input, ...) -> Tensor".
        state: what `run` keeps.
        why_apart: of one that may run others' code, whose calls keep their order in a graph
            (`torch_api.turns`): says why a call with these arguments cannot be recorded; None: it
            can. None where `run` is our own code alone: any call may be recorded, in any order.

    Returns:
        The operator and its state: of the copy of this pack that was imported first.
    """
    name = schema.partition("(")[0]
    packet: Any = getattr(getattr(torch.ops, NAMESPACE), name, None)
    if packet is None:

        def called(*args: Any, turn: int = 0) -> Any:
            recorder = now().recorder
            if recorder is None or why_apart is None or (why := why_apart(*args)) is None:
                return run(*args)
            return recorder.stand_apart(run, fake, args, why)

        traced = fake
        if why_apart is not None:
            schema, traced = turns.taking(schema), turns.without(fake)
        library = _library()
        library.define(schema)
        library.impl(name, called, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", traced, lib=library)
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        if why_apart is not None:
            turns.keep(packet.default)
        setattr(packet, _STATE, state)
        setattr(packet, _LIBRARY, library)
    return packet.default, getattr(packet, _STATE)


def _make_library() -> Any:
    return torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


#: Torch notes the file that asks for a library, and takes no path that is not UTF-8, as this one's
#: may be: to it the code is of a file of another name.
_library = FunctionType(_make_library.__code__.replace(co_filename=NAMESPACE), globals())


def live(
    what: str,
    compute: Callable[[], torch.Tensor],
    shape: tuple[Any, ...],
    *inputs: torch.Tensor,
    dtype: torch.dtype | None = None,
    layout: str = CONTIGUOUS,
    own: bool = False,
) -> torch.Tensor:
    """Run others' code within a graph.

    Args:
        what: its name for people.
        shape: that the graph expects.
        inputs: of the code; it may return one of them.
        dtype: likewise; None: the first input's.
        layout: of the result.
        own: whether to copy the result in any case: the code may keep it.

    Returns:
        A tensor of its own.

    Raises:
        Whatever the code raises, marked to pass; ValueError, likewise, for another shape.
    """
    try:
        result = compute()
        if tuple(result.shape) != shape:
            raise ValueError(f"{what} must give {list(shape)}, gave {list(result.shape)}")
    except Exception as error:
        let_pass(error)
        raise
    memory, dtype = result.untyped_storage().data_ptr(), dtype or inputs[0].dtype
    given = any(each.untyped_storage().data_ptr() == memory for each in inputs)
    lies = memory_format(result, layout)
    if given or own or result.dtype is not dtype or not result.is_contiguous(memory_format=lies):
        result = result.to(dtype, copy=True, memory_format=lies)
    return result
