"""Activations that the host folds into the next product, where that quantises rows.

Relies on the host's `comfy/ops.py` (`linear_input_act`, `INPUT_ACT_EAGER`); without them nothing is
folded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import formats

_FOLDED = "linear_input_act"


def passes_over(layer: torch.nn.Module) -> bool:
    """Tell whether the host then reads a layer's weight without calling the layer."""
    form = formats.of(layer)
    return form is not None and form.quantises_rows


def activated(x: torch.Tensor, act: str) -> torch.Tensor:
    """Apply one of the host's activations; "" is none."""
    if not act:
        return x
    import comfy.ops

    result: torch.Tensor = comfy.ops.INPUT_ACT_EAGER[act](x)
    return result


def multiply(layer: torch.nn.Module, x: torch.Tensor, act: str) -> torch.Tensor:
    """Return `layer(act(x))`, as the host computes it."""
    import comfy.ops

    result: torch.Tensor = comfy.ops.linear_input_act(layer, x, act)
    return result


@contextlib.contextmanager
def answered_by(
    function: Callable[[Any, torch.Tensor, str], torch.Tensor | None],
) -> Iterator[None]:
    """Have the host's code ask a function first. For a worker, while it traces."""
    import comfy.ops

    host = getattr(comfy.ops, _FOLDED, None)
    if host is None:
        yield
        return

    def asked(layer: Any, x: torch.Tensor, act: str) -> torch.Tensor:
        found = function(layer, x, act)
        result: torch.Tensor = host(layer, x, act) if found is None else found
        return result

    setattr(comfy.ops, _FOLDED, asked)
    try:
        yield
    finally:
        setattr(comfy.ops, _FOLDED, host)
