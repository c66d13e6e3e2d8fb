"""What the host folds into a product that quantises rows: an activation before it, and on 0.36 and
newer a norm, or a residual after it.

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
def answered_by(folded: Callable[[Any, str], Any]) -> Iterator[None]:
    """Have the host's code ask a function first: for a layer and the name of an activation it
    returns a layer that does both, or None. All else that the host folds is then computed beside
    the product, by the host's own words for a layer of plain weights. For a worker, while it
    traces.
    """
    import comfy.ops

    host = getattr(comfy.ops, _FOLDED, None)
    if host is None:
        yield
        return

    def asked(layer: Any, x: torch.Tensor, act: str | None, *more: Any, **named: Any) -> Any:
        known = act is not None and act in comfy.ops.INPUT_ACT_EAGER
        both = folded(layer, str(act)) if known else None
        if both is None:
            return host(layer, x, act, *more, **named)
        return host(both, x, None, *more, **named) if more or named else both(x)

    setattr(comfy.ops, _FOLDED, asked)
    try:
        yield
    finally:
        setattr(comfy.ops, _FOLDED, host)
