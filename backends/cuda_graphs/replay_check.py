"""Inputs and outputs of one eager call, which a capture must reproduce before it is replayed.

A capture reads and writes fixed addresses, and contains values that were made on the processor.
Whether it computes what the call does is seen by computing a previous call again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..kinds.tolerance import REPEATED_L2, judge
from ..reasons import Reason, of
from .captured_call import told
from .signatures import CallValues, CaptureError, read_result

#: In bytes, of the tensors that a call is given, and of those that it gives. A larger call is made
#: anew once it is captured.
MOST_BYTES = 2**24


def may_be_kept(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether copies of a call's tensors may stay until the next one."""
    return sum(tensor.nbytes for tensor in tensors) <= MOST_BYTES


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors."""
    return [tensor.detach().clone() for tensor in tensors]


@dataclass
class ReplayCheck:
    """One call of a signature.

    Attributes:
        inputs: nothing may write into them, not even the call.
        epoch: of the weights that it reads.
        results: copies; None until it has ended.
    """

    inputs: Sequence[torch.Tensor]
    epoch: int
    results: list[torch.Tensor] | None = None

    def tells_of(self, epoch: int) -> bool:
        """Whether the call has ended, and was made with the weights of an epoch."""
        return self.results is not None and self.epoch == epoch


def why_other(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Reason | None:
    """Say why a capture's results differ from the call's. Waits for the device."""
    found = judge(results, expected, most=REPEATED_L2)
    return None if found.is_good else of("replays_otherwise", error=f"{found.error:.0e}")


def is_proved(
    replay: Callable[[Sequence[torch.Tensor]], Any],
    check: ReplayCheck | None,
    make: Callable[[], ReplayCheck],
) -> bool:
    """Have a capture compute a previous call; False if the weights are not in place after all.

    Args:
        replay: computes by the capture; None: they are not.
        check: one of this run, if any. On a difference the call is made once more, because
            weights can change in place between two calls.
        make: makes the call that is captured.

    Raises:
        CaptureError: its result differs, or there is no memory for it.
    """
    one = make() if check is None else check
    result = replay(one.inputs)
    if result is None:
        return False
    assert one.results is not None
    with told():
        problem = why_other(read_result(result).tensors, one.results)
    if problem is not None and check is not None:
        return is_proved(replay, None, make)
    if problem is not None:
        raise CaptureError(problem)
    return True


def made(call: CallValues, run: Callable[..., Any], epoch: int) -> ReplayCheck:
    """Make a call on copies, as it would be made without a capture."""
    with told():
        args, kwargs = call.over(copies(call.tensors))
        results = copies(read_result(run(*args, **kwargs)).tensors)
    return ReplayCheck(call.tensors, epoch, results)
