"""Inputs and outputs of one eager call, which a capture must reproduce before it is replayed.

A capture reads and writes fixed addresses, and contains values that were made on the processor.
Whether it computes what the call does is seen by computing a previous call again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kinds.tolerance import REPEATED_L2, judge
from ..reasons import Reason, of

#: In bytes, of the tensors that a call is given, and of those that it gives. A larger call is made
#: anew once it is captured.
MOST_BYTES = 2**24


def may_be_kept(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether copies of a call's tensors may stay until the next one."""
    return sum(tensor.nbytes for tensor in tensors) <= MOST_BYTES


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors."""
    return [tensor.detach().clone() for tensor in tensors]


class ReplayCheck:
    """One call of a signature."""

    def __init__(self, inputs: Sequence[torch.Tensor], epoch: int) -> None:
        """Keep a call's inputs; nothing may write into them, not even the call.

        Args:
            epoch: of the weights that it reads.
        """
        self.inputs = inputs
        self.epoch = epoch
        self._results: list[torch.Tensor] | None = None

    def gave(self, results: Sequence[torch.Tensor]) -> None:
        """Keep copies of the call's results."""
        self._results = copies(results)

    def tells_of(self, epoch: int) -> bool:
        """Whether the call has ended, and was made with the weights of an epoch."""
        return self._results is not None and self.epoch == epoch

    def why_not(self, results: Sequence[torch.Tensor]) -> Reason | None:
        """Say why a capture with these results does not compute what the call did. Waits for the
        device.
        """
        assert self._results is not None
        return why_other(results, self._results)


def why_other(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Reason | None:
    """Say why a capture's results differ from the call's. Waits for the device."""
    found = judge(results, expected, most=REPEATED_L2)
    return None if found.is_good else of("replays_otherwise", error=f"{found.error:.0e}")
