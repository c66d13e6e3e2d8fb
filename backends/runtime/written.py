"""What a host block writes into its inputs, written there by a region.

Graphs are pure: they write into nothing. The host's block may add to a tensor in place and return
it, and others who kept that tensor see the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..plans.plan import Form


def leave(
    form: Form, inputs: Sequence[Any], results: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Write into a block's inputs what the host's code writes there.

    Args:
        form: of the block.
        inputs: as its caller gave them.
        results: of the graph, or of the host's code on copies of the inputs.

    Returns:
        What the block returns: the inputs themselves, if the host's block does so.
    """
    given = list(results)
    for i in form.writes:
        written: torch.Tensor = inputs[i]
        written.copy_(results[i])
        if form.gives_back(i, written.dtype):
            given[i] = written
    return tuple(given)
