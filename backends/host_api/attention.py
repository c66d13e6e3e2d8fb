"""Which of PyTorch's attention kernels the host asks for.

Relies on the host's `comfy/ops.py` (`SDPA_BACKEND_PRIORITY`), which sets it on CUDA alone.
"""

from __future__ import annotations

import contextlib
from typing import Any


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
