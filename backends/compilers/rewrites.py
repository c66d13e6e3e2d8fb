"""Operators that are traced in another form than the host's code names: the same maths, in an order
that suits the layout. The build compares the outcome with the host's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..kinds.layout import CHANNELS_LAST
from ..torch_api.tracing import realized


def rewritten(layout: str) -> tuple[Callable[..., Any], ...]:
    """Return the functions that stand in for operators in this layout: parts of a kind's code."""
    return (group_norm,) if layout == CHANNELS_LAST else ()


def tracing(layout: str) -> AbstractContextManager[Any]:
    """While this lasts, torch's operators are the rewritten ones."""
    return _Rewrites() if layout == CHANNELS_LAST else nullcontext()


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`torch.nn.functional.group_norm` for `[batch, C, height, width]` in channels-last order.

    Sums run over each channel's pixels first and over the channels of a group then: neighbouring
    threads read neighbouring channels. By groups they would read a few bytes of each pixel. What is
    left for each pixel is one factor and one offset per channel, computed once and not per pixel.
    """
    batch, channels, height, width = input.shape
    groups = (batch, num_groups, channels // num_groups)
    each = (batch, 1, 1, channels)
    x = input.permute(0, 2, 3, 1).float()
    variances, means = torch.var_mean(x.reshape(batch, height * width, channels), 1, correction=0)
    means, variances = means.view(groups), variances.view(groups)
    mean = means.mean(-1, keepdim=True)
    variance = variances.mean(-1, keepdim=True) + (means - mean).square().mean(-1, keepdim=True)
    factor = torch.rsqrt(variance + eps).expand(groups)
    if weight is not None:
        factor = factor * weight.float().view(groups[1:])
    offset = -mean * factor
    if bias is not None:
        offset = offset + bias.float().view(groups[1:])
    y = x * realized(factor.reshape(each)) + realized(offset.reshape(each))
    return y.to(input.dtype).permute(0, 3, 1, 2)


class _Rewrites(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.group_norm and args[0].dim() == 4:
            func = group_norm
        return func(*args, **(kwargs or {}))
