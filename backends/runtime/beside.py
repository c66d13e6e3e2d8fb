"""A call of a learned block in which its graph is compared: the host makes the call and its result
is used. The graph computes the same inputs.

It is unknown what the model's own code does with a block's result. So more than its values is
compared: which object it is, its layout in memory, and what was written into the inputs. Neither
the root's code nor a block's runs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ..plans.binding import Beside


class Inputs(NamedTuple):
    """A region's inputs before the host's code gets them.

    Attributes:
        live: the inputs themselves.
        copies: of the tensors among them.
        marks: the tensors' attributes.
    """

    live: Sequence[Any]
    copies: Sequence[Any]
    marks: Sequence[dict[str, Any]]

    @classmethod
    def of(cls, live: Sequence[Any]) -> Inputs:
        """Copy them."""
        copies = [v.clone() if isinstance(v, torch.Tensor) else v for v in live]
        return cls(live, copies, [dict(getattr(v, "__dict__", ())) for v in live])

    def before(self, writes: Sequence[int]) -> list[Any]:
        """The inputs as they were, copied where they are written into."""
        return [self.copies[i] if i in writes else v for i, v in enumerate(self.live)]

    def are_changed(self, writes: Sequence[int]) -> bool:
        """Tell whether one has changed for which that was not learned."""
        return any(
            dict(getattr(one, "__dict__", ())) != marks
            or (isinstance(one, torch.Tensor) and i not in writes and not _is_equal(one, copy))
            for i, (one, copy, marks) in enumerate(zip(*self, strict=True))
        )


class ByHost(Beside):
    """One call made by the host.

    Attributes:
        parted: tells what of a block's result a region gives: tensors, or None where that is
            otherwise than was learned.
    """

    def __init__(self, inputs: Inputs, judge: Callable[[ByHost, Any], None]) -> None:
        """Set up, before the call.

        Args:
            inputs: of the region.
            judge: compares, once there is the host's result.
        """
        self.inputs, self._judge = inputs, judge
        self.parted: Callable[[Any], list[torch.Tensor] | None] = lambda result: None

    def made(self, own: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make the call as the host does, and compare; what the host's code raises passes."""
        result = own(*args, **kwargs)
        self._judge(self, result)
        return result


def order_of(tensor: torch.Tensor) -> list[int] | None:
    """Return the memory order of a tensor's dimensions; None: the plain one."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda axis: -strides[axis])


def laid(
    results: Sequence[torch.Tensor], orders: Sequence[list[int] | None]
) -> tuple[torch.Tensor, ...]:
    """Return results with their dimensions in these orders."""
    return tuple(
        one
        if order is None
        else torch.empty_permuted(one.shape, order, dtype=one.dtype, device=one.device).copy_(one)
        for one, order in zip(results, orders, strict=True)
    )


def laid_otherwise(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    """Tell whether a result differs from the host's in its kind of tensor or in its layout."""
    return any(_layout(one) != _layout(other) for one, other in zip(ours, theirs, strict=True))


def _layout(tensor: torch.Tensor) -> Hashable:
    strides = tuple(
        stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    )
    return (
        type(tensor),
        strides,
        tensor.storage_offset(),
        tensor.is_contiguous(),
        tensor.requires_grad,
        tensor.is_inference(),
        tensor.is_conj() or tensor.is_neg(),
    )


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
