"""Replaces operators while tracing: the same maths, in an order that suits the layout. The build
compares the result with the host's own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from ..device.gpu import is_gpu
from ..host_api import kitchen
from ..kinds.layout import CHANNELS_LAST
from ..operators import head_rotation, host_attention
from ..operators.head_rotation import norm, rotate
from ..torch_api import compiling
from ..torch_api.tracing import is_by_channels, operator_name, realized

#: The rows of a query `[batch, heads, rows, width]`.
_ROWS = 2


def rewritten(layout: str) -> tuple[Callable[..., Any], ...]:
    """Return the functions that replace operators in this layout, as they are part of a kind's
    code.
    """
    rotations = (rotate, rotate_joined, rotate_halves, rotate_both_halves)
    norms = (norm, norm_and_rotate, norm_and_rotate_both, norm_and_modulate, center_and_modulate)
    halves = (norm_and_rotate_halves, norm_and_rotate_both_halves)
    for_all = (*rotations, *norms, *halves, join_rows, by_rows, gelu, repeats_once)
    return (group_norm, by_channels, *for_all) if layout == CHANNELS_LAST else for_all


def tracing(layout: str) -> AbstractContextManager[Any]:
    """Within this, operators of torch and of the host's library are the rewritten ones."""
    return _Rewrites(layout)


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
        rows = part.shape[_ROWS]
        own = table.narrow(_ROWS, begin, rows).transpose(1, _ROWS)
        # Realized, or it waits in float32 for a pass that joins them.
        rotated.append(realized(rotate(part.transpose(1, _ROWS), own)))
        begin = begin + rows
    return torch.cat(rotated, 1).transpose(1, _ROWS)


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join parts `[batch, heads, rows, width]` by rows, rows first in memory, as their products
    return them.
    """
    return torch.cat([part.transpose(1, _ROWS) for part in parts], 1).transpose(1, _ROWS)


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
    return _by_heads(q, k, freqs_cis, q_scale, other, epsilon, rounds=False) or (
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
    return tensor.transpose(1, _ROWS).contiguous().transpose(1, _ROWS)


_BY_CHANNELS = {"memory_format": torch.channels_last_3d}
_APPLY = f"{kitchen.PACKAGE}.apply_rope"
_NORM = {
    f"{kitchen.PACKAGE}.rms_rope1": norm_and_rotate,
    f"{kitchen.PACKAGE}.rms_rope": norm_and_rotate_both,
    f"{kitchen.PACKAGE}.rms_rope_split_half1": norm_and_rotate_halves,
    f"{kitchen.PACKAGE}.rms_rope_split_half": norm_and_rotate_both_halves,
    f"{kitchen.PACKAGE}.apply_rope_split_half1": rotate_halves,
    f"{kitchen.PACKAGE}.apply_rope_split_half": rotate_both_halves,
    f"{kitchen.PACKAGE}.rms_adaln": norm_and_modulate,
    f"{kitchen.PACKAGE}.adaln": center_and_modulate,
}
#: Which writes into its inputs.
_NORM_IN_PLACE = f"{kitchen.PACKAGE}.rms_rope_split_half_"


Source = TypeVar("Source")
#: Tensors by identity, and what each was made of.
_Made: TypeAlias = list[tuple[torch.Tensor, Source]]


class _Rewrites(TorchFunctionMode):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self._channels_last = layout == CHANNELS_LAST
        #: What was joined by its rows, and of which parts.
        self._joined: _Made[Sequence[torch.Tensor]] = []
        #: What was normed row by row, of what, by which scale and epsilon.
        self._normed: _Made[tuple[torch.Tensor, torch.Tensor, float]] = []
        #: What was repeated for the heads that share it, and of what.
        self._repeated: _Made[torch.Tensor] = []
        #: What an operator of the library writes into, and what it would have there.
        self._written: _Made[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._written:
            args = tuple(self._current(value) for value in args)
        if func is torch.nn.functional.group_norm:
            if self._channels_last and args[0].dim() == 4:
                func = group_norm
        elif func is torch.Tensor.contiguous:
            if kwargs == _BY_CHANNELS and len(args) == 1:
                # On a CPU sizes say in which order a convolution's result comes: all is turned.
                if not is_gpu(args[0].device):
                    return args[0]
                func, kwargs = by_channels, {}
        elif func is torch.cat:
            return self._cat(*args, **kwargs)
        elif func is torch.nn.functional.gelu:
            if kwargs == {"approximate": "tanh"}:
                func, kwargs = gelu, {}
        elif func is torch.Tensor.repeat:
            if not kwargs and repeats_once(*args):
                return args[0]
        elif func is torch.Tensor.repeat_interleave:
            return self._repeat(*args, **kwargs)
        elif func is torch.nn.functional.rms_norm:
            return self._norm(*args, **kwargs)
        elif func is host_attention.OPERATOR:
            return self._attend(*args, **kwargs)
        elif (name := operator_name(func)) is not None:
            if name == f"{_APPLY}1":
                func = self._rotate
            elif name == _APPLY:
                func = self._rotate_both
            elif name == _NORM_IN_PLACE:
                func = self._norm_in_place
            else:
                func = _NORM.get(name, func)
        return func(*args, **kwargs)

    def _cat(self, tensors: Any, dim: int = 0, **others: Any) -> torch.Tensor:
        plain = not others and not self._channels_last
        if dim != _ROWS or not plain or any(tensor.dim() != 4 for tensor in tensors):
            return torch.cat(tensors, dim, **others)
        result = join_rows(tensors)
        self._joined.append((result, tuple(tensors)))
        return result

    def _repeat(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = tensor.repeat_interleave(*args, **kwargs)
        if result.dim() == tensor.dim() == 4 and result.shape[2:] == tensor.shape[2:]:
            self._repeated.append((result, tensor))
        return result

    def _attend(
        self, query: Any, key: Any, value: Any, mask: Any, heads: int, split: bool, *others: Any
    ) -> torch.Tensor:
        if split:
            key, value = self._grouped(key), self._grouped(value)
            query, key = by_rows(query), by_rows(key)
        result: torch.Tensor = host_attention.OPERATOR(
            query, key, value, mask, heads, split, *others
        )
        return result

    def _norm_in_place(
        self, q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Out of place: later reads of these tensors get the results. The host does not read their
        base tensors any more, which the build's comparison would show.
        """
        both = norm_and_rotate_both_halves(q, k, *args, **kwargs)
        self._written += zip((q, k), both, strict=True)
        return both

    def _current(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        found = _made_of(self._written, value)
        return value if found is None else found

    def _grouped(self, tensor: torch.Tensor) -> torch.Tensor:
        """The operator repeats only where its kernel needs it."""
        source = _made_of(self._repeated, tensor)
        return tensor if source is None else source

    def _norm(
        self,
        x: torch.Tensor,
        shape: Any,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        result = torch.nn.functional.rms_norm(x, shape, weight, eps)
        if weight is not None and len(shape) == 1:
            # Torch's own for what it computes in float32.
            epsilon = torch.finfo(torch.float32).eps if eps is None else eps
            self._normed.append((result, (x, weight, epsilon)))
        return result

    def _rotate(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        parts = _made_of(self._joined, x)
        if parts is None or table.shape[_ROWS] != x.shape[_ROWS]:
            return rotate(x, table)
        return rotate_joined(parts, table)

    def _rotate_both(
        self, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            self._normed_and_rotated(query, key, table)
            or self._parts_normed_and_rotated(query, key, table)
            or (self._rotate(query, table), self._rotate(key, table))
        )

    def _normed_and_rotated(
        self, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """From what was normed before, by one operator; None if it does not support these."""
        of_query, of_key = (_made_of(self._normed, x) for x in (query, key))
        if of_query is None or of_key is None or of_query[2] != of_key[2]:
            return None
        (q, q_scale, epsilon), (k, k_scale, _) = of_query, of_key
        return _by_heads(q, k, table, q_scale, k_scale, epsilon, rounds=True)

    def _parts_normed_and_rotated(
        self, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same for what was joined from normed parts."""
        of_query, of_key = (_made_of(self._joined, x) or () for x in (query, key))
        if not of_query or len(of_query) != len(of_key) or table.dim() != 6:
            return None
        found, begin = [], 0
        for q, k in zip(of_query, of_key, strict=True):
            rows = q.shape[_ROWS]
            both = self._normed_and_rotated(q, k, table.narrow(_ROWS, begin, rows))
            if both is None:
                return None
            found.append(both)
            begin = begin + rows
        queries, keys = zip(*found, strict=True)
        return join_rows(queries), join_rows(keys)


def _made_of(made: _Made[Source], tensor: torch.Tensor) -> Source | None:
    """What a tensor was made from; None if it is not among these."""
    return next((source for result, source in made if result is tensor), None)


def _by_heads(
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
    sides = {dim: table.shape[dim] for dim in (1, _ROWS)}
    of_heads = next((dim for dim, n in sides.items() if type(n) is int and n == 1), None)
    if of_heads is None:
        return None
    x = tuple(t if of_heads == _ROWS else t.transpose(1, _ROWS) for t in (query, key, table))
    if not head_rotation.is_for(*x):
        return None
    found = head_rotation.OPERATOR(*x, query_scale, key_scale, epsilon, rounds)
    return tuple(t if of_heads == _ROWS else t.transpose(1, _ROWS) for t in found)
