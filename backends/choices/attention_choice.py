"""Chooses the attention kernel at run time where the host would use PyTorch's own.

The host prefers flash attention. On some cards cuDNN's is much faster over many tokens, on others
not; so both are timed (`ways`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..device.gpu import kind_of
from .autotuner import HOST, Autotuner

FILE_NAME = "attention.json"
CUDNN = "cudnn"
#: cuDNN makes a plan for each new size in each process: milliseconds of the processor.
PLAN_MS = 65
#: Steps of one size that are to pay for it: some images' in a process. How many a run has left says
#: less: the choice stays, in what is captured, too.
STEPS = 200
#: Times differ by as much by themselves.
LEAST_MS = 0.004
#: Fewer products of queries and keys take less time than could be saved.
FEWEST_PRODUCTS = 2**20
_WIDEST_HEAD = 128
_BACKENDS: Any = torch.backends


class AttentionChoice:
    """The times of this machine, and the choices that they make; for any thread."""

    def __init__(self, directory: Path, machine: str) -> None:
        """Read the times that were kept.

        Args:
            directory: the pack's private folder.
            machine: a name for this machine's card and PyTorch.
        """
        self.ways = Autotuner(directory / FILE_NAME, machine, (CUDNN,))

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
        """Compute attention without a mask, by the faster kernel.

        Args:
            query: [batch, rows, heads * width], or [batch, heads, rows, width] where `split`.
            key: likewise; of fewer heads if heads share them.
            value: as `key`.
            calls: how many such calls a step makes.
            host: the same by the host's function, which would use PyTorch's own here.

        Returns:
            [batch, rows, heads * width].
        """
        if not _is_open(query):
            return host()
        shapes = query.shape, key.shape, query.stride(), key.stride()
        form = (*shapes, query.dtype, heads, split, query.device)

        def cudnn() -> torch.Tensor:
            return _cudnn(*(_heads(t, heads, split) for t in (query, key, value)))

        return self.ways.run(
            form,
            lambda: _class(query, key, value, heads, split=split),
            {HOST: host, CUDNN: cudnn},
            must_save_ms=must_save_ms(calls),
            device=query.device,
        )


def must_save_ms(calls: int) -> float:
    """How much each call must save by cuDNN's kernel, of so many in a step, to pay for its plan."""
    return max(PLAN_MS / (STEPS * calls), LEAST_MS)


def _is_open(query: torch.Tensor) -> bool:
    """Whether there is a choice in this process, with its current settings."""
    return (
        kind_of(query.device).has_cudnn_attention
        and query.dtype in (torch.float16, torch.bfloat16)
        and _BACKENDS.cuda.cudnn_sdp_enabled()
        and _BACKENDS.cudnn.enabled
        and not torch.are_deterministic_algorithms_enabled()
    )


def _class(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, *, split: bool
) -> str | None:
    """The class of these sizes; None: the host's kernel without timing."""
    q, k, v = (_heads(tensor, heads, split) for tensor in (query, key, value))
    batch, heads, rows, width = q.shape
    groups = k.shape[1]
    if k.shape != v.shape or k.shape[0] != batch or width > _WIDEST_HEAD or width % 8:
        return None
    if heads % groups:
        return None
    if rows * k.shape[2] < FEWEST_PRODUCTS:
        return None
    order = "split" if q.is_contiguous() else "joint"
    if groups != heads:
        order += f" {heads // groups}"
    counts = (round(2 * math.log2(n)) for n in (batch * heads, rows, k.shape[2]))
    return f"{str(q.dtype).removeprefix('torch.')} {width} {order} {' '.join(map(str, counts))}"


def _heads(tensor: torch.Tensor, heads: int, split: bool) -> torch.Tensor:
    """As [batch, heads, rows, width]."""
    if split:
        return tensor
    return tensor.view(*tensor.shape[:2], heads, -1).transpose(1, 2)


def _cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    try:
        operator = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        result: torch.Tensor = operator(query, key, value, None, False)[0]
    except (AttributeError, TypeError) as error:  # another PyTorch's takes other arguments
        raise RuntimeError(f"PyTorch's cuDNN attention is not the known one: {error}") from error
    return result.transpose(1, 2).flatten(2)
