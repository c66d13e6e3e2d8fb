"""Memory: tensors over what they do not own, and many copies at once.

Source: torch/_inductor/cudagraph_trees.py of torch 2.10-2.15, which does both likewise.
"""

from __future__ import annotations

from typing import Any

import torch


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that does not keep it alive.

    Raises:
        RuntimeError: this PyTorch makes no such tensor.
    """
    try:
        make: Any = torch._C._construct_storage_from_data_pointer
        storage = make(tensor.data_ptr(), tensor.device, extent_bytes(tensor))
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, 0, tensor.shape, tensor.stride())
    except (AttributeError, TypeError) as error:
        raise RuntimeError(f"torch {torch.__version__} borrows no memory: {error}") from error


def extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first to its last element, gaps included."""
    if not tensor.numel():
        return 0
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * step for n, step in sides)) * tensor.element_size()


def copy_each(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy into tensors of equal shapes and one dtype, by one kernel if this PyTorch can.

    Source: torch/_foreach_utils.py of torch 2.10-2.15.
    """
    together: Any = getattr(torch, "_foreach_copy_", None)
    if together is not None:
        together(into, values)
        return
    for tensor, value in zip(into, values, strict=True):
        tensor.copy_(value)
