"""How far a graph may be from the host's eager maths on the same inputs.

The bounds are relative L2 errors per region. fp16 and bf16 eager differ from fp32 by about as much:
fusing skips roundings that eager makes, so the error is eager's own, seen from the other side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..device.gpu import is_gpu

#: cuDNN's fp32 convolutions round their factors to 10 bits unless told not to, and another layout
#: or algorithm rounds other ones.
TF32_L2 = 2e-3
RELATIVE_L2 = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}
#: Where inputs of products are quantised, an element between two numbers of the format, which lie 6
#: to 12 % apart in fp8, goes to either by its last bit. Two ways to round that share nothing differ
#: by so many times what each of them costs.
TWO_WAYS = math.sqrt(2)
#: Whatever a format costs: results further apart cannot be compared.
COARSEST = 0.3


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


class Difference(NamedTuple):
    """The distance of results from the host's own.

    Attributes:
        errors: the relative L2 error of each result.
        bounds: how large each may be.
    """

    errors: tuple[float, ...]
    bounds: tuple[float, ...]

    @property
    def share(self) -> float:
        """The largest error as a part of its bound; good up to 1."""
        return max(error / most for error, most in zip(self.errors, self.bounds, strict=True))

    @property
    def is_good(self) -> bool:
        """Whether every result is within its bound."""
        return self.share <= 1.0

    @property
    def error(self) -> float:
        """The largest relative L2 error."""
        return max(self.errors)


def difference(
    results: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
    inputs: Sequence[Any],
    *,
    in_full: Callable[[], Sequence[torch.Tensor]] | None = None,
) -> Difference:
    """Compare each result by its reference's bound.

    Args:
        inputs: what both were computed from.
        in_full: computes the references without quantising any product's input. Called if a result
            is beyond the bound of its dtypes: then the error of the format here is the bound, if
            larger.
    """
    if len(results) != len(references):
        return Difference((float("inf"),), (1.0,))
    errors = tuple(map(_error, results, references))
    found = Difference(errors, tuple(bound(reference, inputs) for reference in references))
    if found.is_good or in_full is None:
        return found
    costs = map(relative_l2, references, in_full())
    allowed = (min(TWO_WAYS * cost, COARSEST) if math.isfinite(cost) else 0.0 for cost in costs)
    return Difference(errors, tuple(map(max, found.bounds, allowed)))


def _error(result: torch.Tensor, reference: torch.Tensor) -> float:
    if result.shape != reference.shape or result.dtype != reference.dtype:
        return float("inf")
    return relative_l2(result, reference)


def tells_nothing(references: Sequence[torch.Tensor]) -> bool:
    """Whether one of the results has nothing to compare with: not one finite value."""
    return not all(bool(torch.isfinite(reference).any()) for reference in references)


def nudged(value: Any, amount: float) -> Any:
    """Return a tensor whose elements are moved up and down in turn, by this share of themselves;
    anything else as it is.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    turns = torch.arange(value.numel(), device=value.device).reshape(value.shape) % 2
    return value * (1 + amount * (2 * turns - 1)).to(value.dtype)


def bound(reference: torch.Tensor, inputs: Sequence[Any]) -> float:
    """Return how far a result may be from this one (relative L2), by the dtypes involved.

    A block may keep its result in float32 and compute in float16, as its other inputs are.
    """
    dtype = reference.dtype
    own = RELATIVE_L2[str(dtype).removeprefix("torch.")]
    if dtype is torch.float32 and is_gpu(reference.device) and torch.backends.cudnn.allow_tf32:
        own = max(own, TF32_L2)
    given = {str(each.dtype) for each in inputs if isinstance(each, torch.Tensor)}
    return max(own, *(RELATIVE_L2.get(name.removeprefix("torch."), 0.0) for name in given), 0.0)
