"""Operators in other words: the same maths, in an order that suits the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..device.gpu import is_gpu
from ..kinds.layout import CHANNELS_LAST
from ..operators import head_rotation
from ..operators.head_rotation import norm, rotate
from ..torch_api import compiling
from ..torch_api.tracing import is_by_channels, realized

#: The rows of a query `[batch, heads, rows, width]`.
ROWS = 2


def rewritten(layout: str) -> tuple[Callable[..., Any], ...]:
    """Return the functions that replace operators in this layout, as they are part of a kind's
    code.
    """
    rotations = (rotate, rotate_joined, rotate_halves, rotate_both_halves)
    norms = (norm, norm_and_rotate, norm_and_rotate_both, norm_and_modulate, center_and_modulate)
    halves = (norm_and_rotate_halves, norm_and_rotate_both_halves)
    for_all = (*rotations, *norms, *halves, join_rows, by_rows, gelu, repeats_once)
    return (group_norm, by_channels, *for_all) if layout == CHANNELS_LAST else for_all


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`torch.nn.functional.group_norm` for `[batch, C, height, width]` in channels-last order.

    Sums run over each channel's pixels first and then over the channels of a group: neighbouring
    threads read neighbouring channels. By groups they would read a few bytes of each pixel. Each
    pixel then needs only one factor and one offset per channel, computed once; on a GPU by our own
    kernels (`group_moments`).
    """
    batch, channels, height, width = input.shape
    if is_gpu(input.device) and compiling.launches_own_kernels():
        from ..kernels.group_moments import OPERATOR  # needs Triton

        images = input
        if not is_by_channels(input):
            images = input.contiguous(memory_format=torch.channels_last)
        factor, offset = OPERATOR(images, None, None, weight, bias, num_groups, eps)
        each = (batch, channels, 1, 1)
        normed: torch.Tensor = images.float() * factor.view(each) + offset.view(each)
        return normed.to(input.dtype)
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


def by_channels(video: torch.Tensor) -> torch.Tensor:
    """The same `[batch, C, frames, height, width]`, with a pixel's channels adjacent in memory: its
    producer writes it so, and a convolution of it has the same layout. Inductor does so for images,
    but leaves videos contiguous.
    """
    rows = video.permute(0, 2, 3, 4, 1).contiguous()
    # Not a view back: of such a one Inductor would know no order in memory.
    return rows.as_strided(video.shape, rows.permute(0, 4, 1, 2, 3).stride())


def rotate_halves(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """As `rotate`, pairing each element of a row's first half with one of the second."""
    exact = torch.promote_types(table.dtype, torch.float32)
    halves = x.to(exact).reshape(*x.shape[:-1], 2, -1)
    table = table.to(exact).transpose(-3, -2)  # [..., half, width // 2, from]
    first, second = halves[..., :1, :], halves[..., 1:, :]
    rotated: torch.Tensor = table[..., 0] * first + table[..., 1] * second
    return rotated.reshape(x.shape).to(x.dtype)


def rotate_both_halves(
    q: torch.Tensor, k: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotate_halves` for two."""
    return rotate_halves(q, table), rotate_halves(k, table)


def rotate_joined(parts: Sequence[torch.Tensor], table: torch.Tensor) -> torch.Tensor:
    """`rotate` for parts `[batch, heads, rows, width]` that the host joined by rows: each is
    rotated where it is made and written to its place, rows first in memory.
    """
    rotated, begin = [], 0
    for part in parts:
        rows = part.shape[ROWS]
        own = table.narrow(ROWS, begin, rows).transpose(1, ROWS)
        # Realized, or it waits in float32 for a pass that joins them.
        rotated.append(realized(rotate(part.transpose(1, ROWS), own)))
        begin = begin + rows
    return torch.cat(rotated, 1).transpose(1, ROWS)


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join parts `[batch, heads, rows, width]` by rows, rows first in memory, as their products
    return them.
    """
    return torch.cat([part.transpose(1, ROWS) for part in parts], 1).transpose(1, ROWS)


def norm_and_rotate(
    x: torch.Tensor, table: torch.Tensor, scale: torch.Tensor, epsilon: float = 1e-6
) -> torch.Tensor:
    """`norm` and `rotate`, without rounding in between."""
    return rotate(norm(x, scale, epsilon), table).to(x.dtype)


def norm_and_rotate_both(
    q: torch.Tensor,
    k: torch.Tensor,
    freqs_cis: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm_and_rotate` for two; on a GPU one operator, if it supports these."""
    other = q_scale if k_scale is None else k_scale
    return by_heads(q, k, freqs_cis, q_scale, other, epsilon, rounds=False) or (
        norm_and_rotate(q, freqs_cis, q_scale, epsilon),
        norm_and_rotate(k, freqs_cis, other, epsilon),
    )


def norm_and_rotate_halves(
    x: torch.Tensor,
    table: torch.Tensor,
    scale: torch.Tensor,
    epsilon: float = 1e-6,
    rot_dim: int = 0,
) -> torch.Tensor:
    """`norm` and `rotate_halves` of the first `rot_dim` elements of a row; 0 is all of them."""
    normed = norm(x, scale, epsilon)
    if rot_dim in (0, x.shape[-1]):
        return rotate_halves(normed, table).to(x.dtype)
    rotated = rotate_halves(normed[..., :rot_dim], table)
    return torch.cat((rotated, normed[..., rot_dim:]), -1).to(x.dtype)


def norm_and_rotate_both_halves(
    q: torch.Tensor,
    k: torch.Tensor,
    freqs_cis: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    rot_dim: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm_and_rotate_halves` for two."""
    other = q_scale if k_scale is None else k_scale
    return (
        norm_and_rotate_halves(q, freqs_cis, q_scale, epsilon, rot_dim),
        norm_and_rotate_halves(k, freqs_cis, other, epsilon, rot_dim),
    )


def norm_and_modulate(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """RMSNorm without a weight, scaled by one plus `scale` and shifted."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _modulated(normed, scale, shift).to(x.dtype)


def center_and_modulate(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """LayerNorm without a weight, scaled by one plus `scale` and shifted."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = torch.nn.functional.layer_norm(wide, wide.shape[-1:], eps=eps)
    return _modulated(normed, scale, shift).to(x.dtype)


def _modulated(normed: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return normed * (1.0 + scale.to(normed.dtype)) + shift.to(normed.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.gelu(x, approximate="tanh")` by `1 + tanh(u) = 2 sigmoid(2 u)`: the same
    number, whose exponential is one instruction. GPU kernels' tanh takes so many that this pass
    waits for them and not for memory: 77 us against 56 in a block of Wan 14B on an H200.
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    twice = exact * (1.0 + 0.044715 * exact * exact) * (2.0 * math.sqrt(2.0 / math.pi))
    return (exact * torch.sigmoid(twice)).to(x.dtype)


def repeats_once(tensor: torch.Tensor, *repeats: Any) -> bool:
    """Whether `tensor.repeat(*repeats)` is a mere copy, as when each head has its own keys."""
    counts = repeats[0] if len(repeats) == 1 and not isinstance(repeats[0], int) else repeats
    return len(counts) == tensor.dim() and all(type(n) is int and n == 1 for n in counts)


def by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same `[batch, heads, rows, width]`, with a row's heads adjacent in memory: PyTorch's
    kernels give attention's result the queries' layout, so it becomes `[batch, rows, ...]` without
    a copy.
    """
    return tensor.transpose(1, ROWS).contiguous().transpose(1, ROWS)


def by_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor,
    query_scale: torch.Tensor,
    key_scale: torch.Tensor,
    epsilon: float,
    *,
    rounds: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Norm and rotate by the operator, if it supports these, on a GPU."""
    if any(x.dim() != 4 for x in (query, key)) or table.dim() != 6:
        return None
    # Symbols are not asked: a graph is for one row as well.
    sides = {dim: table.shape[dim] for dim in (1, ROWS)}
    of_heads = next((dim for dim, n in sides.items() if type(n) is int and n == 1), None)
    if of_heads is None:
        return None
    x = tuple(t if of_heads == ROWS else t.transpose(1, ROWS) for t in (query, key, table))
    if not head_rotation.is_for(*x):
        return None
    found = head_rotation.OPERATOR(*x, query_scale, key_scale, epsilon, rounds)
    return tuple(t if of_heads == ROWS else t.transpose(1, ROWS) for t in found)
