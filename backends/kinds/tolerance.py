"""How far a graph may be from the host's eager maths on the same inputs.

The bounds are relative L2 errors per region. fp16 and bf16 eager differ from fp32 by about as much:
fusing skips roundings that eager makes, so the error is eager's own, seen from the other side.
"""

from __future__ import annotations

from typing import Any

import torch

#: cuDNN's fp32 convolutions round their factors to 10 bits unless told not to, and another layout
#: or algorithm rounds other ones.
TF32_L2 = 2e-3
RELATIVE_L2 = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}


def relative_l2(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||result - reference|| / ||reference||, in float32 at least, over the values that are
    finite in the reference; infinite where one is not finite in the result alone. Waits for the
    device.

    Eager fp16 may overflow where a graph, which rounds less often, does not.
    """
    finite = torch.isfinite(reference)
    if not bool((torch.isfinite(result) | ~finite).all()):
        return float("inf")
    dtype = torch.promote_types(reference.dtype, torch.float32)
    wide = torch.where(finite, reference, 0).to(dtype)
    difference = torch.where(finite, result, 0).to(dtype) - wide
    norm = float(torch.linalg.vector_norm(wide))
    error = float(torch.linalg.vector_norm(difference))
    return error / norm if norm > 0 else error


def within(result: torch.Tensor, reference: torch.Tensor) -> tuple[bool, float]:
    """Compare by the bound of the reference's dtype; returns (good, relative L2 error)."""
    if result.shape != reference.shape or result.dtype != reference.dtype:
        return False, float("inf")
    error = relative_l2(result, reference)
    return error <= bound(reference), error


def tells_nothing(reference: torch.Tensor) -> bool:
    """Whether there is nothing to compare with: not one finite value."""
    return not bool(torch.isfinite(reference).any())


def nudged(value: Any, amount: float) -> Any:
    """Return a tensor whose elements are moved up and down in turn, by this part of themselves;
    anything else as it is.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    turns = torch.arange(value.numel(), device=value.device).reshape(value.shape) % 2
    return value * (1 + amount * (2 * turns - 1)).to(value.dtype)


def bound(reference: torch.Tensor) -> float:
    """Return how far a result may be from this one (relative L2)."""
    if reference.dtype is torch.float32 and reference.is_cuda and torch.backends.cudnn.allow_tf32:
        return TF32_L2
    return RELATIVE_L2[str(reference.dtype).removeprefix("torch.")]
