"""Inputs and outputs of one eager call, which a capture must reproduce before it is replayed.

A capture reads and writes where its memory lies in that moment, and holds values that were made on
the processor. Whether it computes what the call does shows in what it gives for the inputs of a
call that was made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kinds.tolerance import relative_l2
from ..reasons import Reason, of

#: Relative L2: the same kernels, of which some may add in another order each time.
LIMIT = 1e-2
#: In bytes, of the tensors that a call is given, and of those that it gives. A larger call is made
#: anew once it is captured.
MOST_BYTES = 2**24


def may_be_kept(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether copies of a call's tensors may stay until the next one."""
    return sum(tensor.nbytes for tensor in tensors) <= MOST_BYTES


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors."""
    return [tensor.detach().clone() for tensor in tensors]


class Shown:
    """One call of a signature."""

    def __init__(self, inputs: Sequence[torch.Tensor], epoch: int) -> None:
        """Keep what a call is given: nobody may write into that, the call least of all.

        Args:
            epoch: of the weights that it reads.
        """
        self.inputs = inputs
        self.epoch = epoch
        self._results: list[torch.Tensor] | None = None

    def gave(self, results: Sequence[torch.Tensor]) -> None:
        """Keep copies of what the call gave."""
        self._results = copies(results)

    def tells_of(self, epoch: int) -> bool:
        """Whether the call has ended, and was made with the weights of an epoch."""
        return self._results is not None and self.epoch == epoch

    def why_not(self, results: Sequence[torch.Tensor]) -> Reason | None:
        """Say why what was captured, which gave these results for its inputs, does not compute what
        the call did. Waits for the device.
        """
        assert self._results is not None
        return why_other(results, self._results)


def why_other(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Reason | None:
    """Say why results of what was captured are not those of the call. Waits for the device."""
    error = max(map(relative_l2, results, expected), default=0.0)
    return of("replays_otherwise", error=f"{error:.0e}") if error > LIMIT else None
