"""Whether results equal the host's eager maths on the same inputs. All that compares asks here.

The bounds are relative L2 errors per region. fp16 and bf16 eager differ from fp32 by about as much:
fusing skips roundings that eager makes, so the error is eager's own, seen from the other side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
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
#: The same kernels twice, of which some add in another order each time.
REPEATED_L2 = 1e-2
#: A result is ill-conditioned where it moves so many times as far as its inputs.
NUDGE = 10


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


class Outcome(Enum):
    """Of a comparison; `UNSURE`: the host's own results are too inexact here to tell."""

    GOOD = "good"
    UNSURE = "unsure"
    BAD = "bad"


class Judgement(NamedTuple):
    """Whether results equal the host's own.

    Attributes:
        outcome: the answer.
        errors: the relative L2 error of each result.
        bounds: how large each may be.
    """

    outcome: Outcome
    errors: tuple[float, ...]
    bounds: tuple[float, ...]

    @property
    def share(self) -> float:
        """The largest error as a part of its bound; good up to 1."""
        pairs = zip(self.errors, self.bounds, strict=True)
        return max((error / most for error, most in pairs), default=0.0)

    @property
    def is_good(self) -> bool:
        """Whether every result is known to be within its bound, or as exact as the host's."""
        return self.outcome is Outcome.GOOD

    @property
    def error(self) -> float:
        """The largest relative L2 error."""
        return max(self.errors, default=0.0)


def judge(
    results: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
    inputs: Sequence[Any] = (),
    *,
    most: float | None = None,
    in_full: Callable[[], Sequence[torch.Tensor]] | None = None,
    exact: Callable[[], Sequence[torch.Tensor]] | None = None,
    again: Callable[[list[Any]], Sequence[torch.Tensor]] | None = None,
) -> Judgement:
    """Compare each result with the host's, by its reference's bound.

    Args:
        inputs: what both were computed from.
        most: the bound, where the same kernels computed both; it is never in doubt.
        in_full: computes the references without quantising any product's input. Called if a result
            is beyond the bound of its dtypes: then the error of the format here is the bound, if
            larger.
        exact: computes them in float64, or nothing where the host's code does not take it. Called
            in doubt: a graph may be half as exact as the host.
        again: computes them from other inputs. Called in doubt instead, with inputs that are moved
            by almost nothing. The last bit of such a call decides.
    """
    if len(results) != len(references):
        return Judgement(Outcome.BAD, (math.inf,), (1.0,))
    errors = tuple(map(_error, results, references))
    bounds = tuple(bound(each, inputs) if most is None else most for each in references)
    found = Judgement(Outcome.GOOD, errors, bounds)
    if found.share > 1 and in_full is not None:
        costs = map(relative_l2, references, in_full())
        allowed = (min(TWO_WAYS * cost, COARSEST) if math.isfinite(cost) else 0.0 for cost in costs)
        found = found._replace(bounds=tuple(map(max, bounds, allowed)))
    if most is None and _tells_nothing(references):
        return found._replace(outcome=Outcome.UNSURE)
    if found.share <= 1:
        return found
    if exact is not None:
        return found._replace(outcome=_beside_exact(results, references, exact()))
    is_unsure = again is not None and _is_ill_conditioned(found, references, inputs, again)
    return found._replace(outcome=Outcome.UNSURE if is_unsure else Outcome.BAD)


def _beside_exact(
    results: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
    truths: Sequence[torch.Tensor],
) -> Outcome:
    """Tell whether a graph is about as near to the same maths in float64 as the host is.

    At their smallest sizes some regions are ill-conditioned: a norm over two nearly equal values
    magnifies the last bit of either, in eager as in a graph. Elsewhere the host itself is wrong.
    """
    if len(truths) != len(references):
        return Outcome.BAD
    hosts = [
        relative_l2(one.double(), truth) for one, truth in zip(references, truths, strict=True)
    ]
    if not all(error <= COARSEST for error in hosts):  # NaN is far off, too
        return Outcome.UNSURE
    ours = (relative_l2(one.double(), truth) for one, truth in zip(results, truths, strict=True))
    as_exact = all(error <= 2 * most for error, most in zip(ours, hosts, strict=True))
    return Outcome.GOOD if as_exact else Outcome.BAD


def _is_ill_conditioned(
    found: Judgement,
    references: Sequence[torch.Tensor],
    inputs: Sequence[Any],
    again: Callable[[list[Any]], Sequence[torch.Tensor]],
) -> bool:
    """Tell whether eager itself moves that far when its inputs move by almost nothing.

    A norm over nearly equal values, as of an empty latent, magnifies the last bit of either.
    """
    if not all(map(math.isfinite, found.errors)):
        return False  # where eager overflows as well, any error would look small
    moved = again([_nudged(value, min(found.bounds) / NUDGE) for value in inputs])
    return len(moved) == len(references) and all(
        error <= most or (far > most and error <= NUDGE * far)
        for error, most, far in zip(
            found.errors, found.bounds, map(relative_l2, moved, references), strict=True
        )
    )


def _error(result: torch.Tensor, reference: torch.Tensor) -> float:
    if result.shape != reference.shape or result.dtype != reference.dtype:
        return float("inf")
    return relative_l2(result, reference)


def _tells_nothing(references: Sequence[torch.Tensor]) -> bool:
    """Whether one of the results has nothing to compare with: not one finite value."""
    return not all(bool(torch.isfinite(each).any()) for each in references if each.numel())


def _nudged(value: Any, amount: float) -> Any:
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
