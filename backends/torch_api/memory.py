"""Tensors over memory that they do not own.

Source: torch/_inductor/cudagraph_trees.py of torch 2.10-2.15, which makes them likewise.
"""

from __future__ import annotations

from typing import Any

import torch


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory, which may be freed all the same.

    Whoever reads it must know that what was there is still there.

    Raises:
        RuntimeError: this PyTorch makes no such tensor.
    """
    try:
        make: Any = torch._C._construct_storage_from_data_pointer
        size = sum(
            (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n
        )
        storage = make(tensor.data_ptr(), tensor.device, (size + 1) * tensor.element_size())
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, 0, tensor.shape, tensor.stride())
    except (AttributeError, TypeError) as error:
        raise RuntimeError(f"torch {torch.__version__} borrows no memory: {error}") from error
