"""Attention as one operator in a graph: it calls, when it runs, what the host would call there.

Which attention a person runs (SageAttention, FlashAttention, another pack's function in the
options) is no part of a graph then: it serves them all, and the choice can change between steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from ..host_api import attention
from ..host_api.options import ATTENTION
from ..kinds import operators


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
        host: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Compute it, by `host` or otherwise."""


class _Thread(threading.local):
    """What the operator goes by in one thread."""

    def __init__(self) -> None:
        #: `transformer_options` of the block that is computed.
        self.options: dict[str, Any] = {}
        #: What chooses between PyTorch's own kernels; None leaves that to the host.
        self.choice: Choice | None = None


@contextlib.contextmanager
def attending_with(options: dict[str, Any]) -> Iterator[None]:
    """Until this ends, let the operator pass these `transformer_options` on."""
    before, _thread.options = _thread.options, options
    try:
        yield
    finally:
        _thread.options = before


@contextlib.contextmanager
def choosing_by(choice: Choice | None) -> Iterator[None]:
    """Until this ends, let the operator take a kernel by this choice where the host would take
    PyTorch's own.
    """
    before, _thread.choice = _thread.choice, choice
    try:
        yield
    finally:
        _thread.choice = before


def opaque(
    function: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **named: Any,
) -> torch.Tensor:
    """Stand in for the host's attention functions (`attention_pytorch` and its like), by the host's
    own means for that: `transformer_options` that name it (`OPTIONS`).
    """
    low_precision = named.pop("low_precision_attention", True)
    beyond = named.keys() - {"transformer_options", "_inside_attn_wrapper"}
    if attn_precision is not None or skip_output_reshape or beyond:
        raise NotImplementedError(f"attention with {', '.join(sorted(beyond)) or 'a precision'}")
    result: torch.Tensor = OPERATOR(query, key, value, mask, heads, skip_reshape, low_precision)
    return result


#: What a form's reference calls the host's block with.
OPTIONS: dict[str, Any] = {ATTENTION: opaque}


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    heads: int,
    split: bool,
    low_precision: bool,
) -> torch.Tensor:
    def host() -> torch.Tensor:
        return attention.attend(
            query,
            _for_each(key),
            _for_each(value),
            mask,
            heads,
            split=split,
            low_precision=low_precision,
            options=_thread.options,
        )

    def _for_each(tensor: torch.Tensor) -> torch.Tensor:
        return ungrouped(tensor, heads) if split else tensor

    def compute() -> torch.Tensor:
        choice = _thread.choice
        if choice is None or mask is not None or not attention.is_plain(_thread.options):
            return host()
        return choice.attend(query, key, value, heads, split=split, host=host)

    return operators.live("attention", compute, _shape(query, heads, split), query, key, value)


def ungrouped(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat keys or values `[batch, groups, rows, width]` for the heads that share them."""
    groups = tensor.shape[1]
    return tensor if groups == heads else tensor.repeat_interleave(heads // groups, dim=1)


def _shape(query: torch.Tensor, heads: int, split: bool) -> tuple[Any, ...]:
    if not split:
        return tuple(query.shape)
    return (query.shape[0], query.shape[2], heads * query.shape[3])


def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    heads: int,
    split: bool,
    low_precision: bool,
) -> torch.Tensor:
    return query.new_empty(_shape(query, heads, split))


OPERATOR, _thread = operators.register(
    "host_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, int heads, bool split,"
    " bool low_precision) -> Tensor",
    _attend,
    _fake,
    _Thread(),
)
