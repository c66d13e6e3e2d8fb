"""The host's attention, and which of PyTorch's kernels it asks for.

Relies on the host's `comfy/ldm/modules/attention.py` (`optimized_attention`, which its arguments
choose and `wrap_attn` is around) and `comfy/ops.py` (`SDPA_BACKEND_PRIORITY`), which sets the order
on CUDA alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from .options import ATTENTION


def host_order() -> contextlib.AbstractContextManager[Any]:
    """Let attention go to the first of the kernels that the host itself asks for.

    Entered for each call, as the host does it: on Hopper torch 2.11 puts an order of its own in its
    place at the first attention of a process.
    """
    try:
        import comfy.ops
        from torch.nn.attention import sdpa_kernel
    except ImportError:
        return contextlib.nullcontext()
    order = getattr(comfy.ops, "SDPA_BACKEND_PRIORITY", None)
    return sdpa_kernel(order, set_priority=True) if order else contextlib.nullcontext()


def is_plain(options: dict[str, Any]) -> bool:
    """Tell whether the host would take PyTorch's own attention in this process, with these options:
    no flag, no node and no pack chose another.
    """
    from comfy.ldm.modules import attention

    own = getattr(attention, "attention_pytorch", None)
    return not options.get(ATTENTION) and attention.optimized_attention is own


def replaceable() -> Callable[..., Any] | None:
    """Return the attention that this process' flags chose if a call's options can name another in
    its place (the host's `wrap_attn`), None if it is another pack's that does not look at them.
    """
    from comfy.ldm.modules import attention

    chosen: Callable[..., Any] = attention.optimized_attention
    code = getattr(chosen, "__code__", None)
    return chosen if code is not None and ATTENTION in code.co_consts else None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    heads: int,
    *,
    split: bool,
    low_precision: bool,
    options: dict[str, Any],
) -> torch.Tensor:
    """Call the attention that the host's blocks call in this process, with these options.

    Args:
        query: [batch, rows, heads * width], or [batch, heads, rows, width] where `split`.
        key: likewise; its rows are the keys'.
        value: as `key`.
        mask: what is added to the products, or None.
        low_precision: whether the host leaves a kernel of fewer bits to choose (0.33 and newer).
        options: the block's `transformer_options`.

    Returns:
        [batch, rows, heads * width].
    """
    from comfy.ldm.modules.attention import optimized_attention

    more = {} if low_precision else {"low_precision_attention": False}
    result: torch.Tensor = optimized_attention(
        query, key, value, heads, mask, skip_reshape=split, transformer_options=options, **more
    )
    return result
