"""What a block of the host leaves in its inputs, left there by a region.

Graphs are pure: they write into nothing. The host's block may have added to the tensor that it was
given and have given it back, and whoever kept that tensor sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..plans.plan import Form


def leave(
    form: Form, inputs: Sequence[Any], results: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Leave in a block's inputs what the host's code leaves there.

    Args:
        form: of the block.
        inputs: as its caller gave them.
        results: of the graph, or of the host's code on copies of the inputs.

    Returns:
        What the block gives back: the very inputs, where it does so.
    """
    given = list(results)
    for i in form.writes:
        written: torch.Tensor = inputs[i]
        written.copy_(results[i])
        if form.gives_back(i, written.dtype):
            given[i] = written
    return tuple(given)
