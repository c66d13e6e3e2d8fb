"""Giving a tensor the memory of another one, where nobody else sees its own.

https://docs.pytorch.org/docs/stable/generated/torch.Tensor.set_.html
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch


def take_over(tensor: torch.Tensor, result: torch.Tensor) -> bool:
    """Let a tensor have what another one holds, in that one's memory: nothing is copied.

    To be called where the other one is dropped afterwards, and not while a CUDA graph is captured,
    which goes on reading and writing at the addresses that it saw.

    Returns:
        False where nothing was done: their sizes or strides differ, or somebody else has a part in
        the memory of either, who is to see what is written there: a view, an alias, an array of
        NumPy, a DLPack capsule, a storage that was kept.
    """
    alone = _alone()
    if (
        alone is None
        or type(tensor) is not torch.Tensor
        or tensor.requires_grad
        or tensor.dtype is not result.dtype
        or tensor.device != result.device
        or tensor.shape != result.shape
        or tensor.stride() != result.stride()
        or _holders(tensor) != alone
        or _holders(result) != alone
    ):
        return False
    tensor.set_(result)  # type: ignore[call-overload]
    return True


def _holders(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Who holds a tensor and its memory: how many in C++, how many in Python, and whether its size
    is fixed, as it is where an array of NumPy was made of it or it of one.
    """
    storage = tensor.untyped_storage()
    return (
        tensor._use_count(),  # type: ignore[attr-defined]
        torch._C._storage_Use_Count(storage._cdata),
        sys.getrefcount(storage),
        storage.resizable(),
    )


@cache
def _alone() -> tuple[Any, ...] | None:
    """What `_holders` says of a tensor that nobody else has a part in; None where this torch does
    not tell, or tells no difference.
    """
    try:
        alone, shared = torch.empty(1), torch.empty(1)
        alias = shared.detach()
        found = _holders(alone)
        return found if _holders(shared) != found != _holders(alias) else None
    except (AttributeError, RuntimeError, TypeError):
        return None
