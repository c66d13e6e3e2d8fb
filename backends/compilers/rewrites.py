"""Replaces operators while tracing: the same maths, in an order that suits the layout. The build
compares the result with the host's own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from ..device.gpu import is_gpu
from ..host_api import kitchen
from ..kinds.layout import CHANNELS_LAST
from ..operators import host_attention
from ..operators.head_rotation import rotate
from ..torch_api.tracing import operator_name
from .replacements import (
    ROWS,
    by_channels,
    by_heads,
    by_rows,
    center_and_modulate,
    gelu,
    group_norm,
    join_rows,
    norm_and_modulate,
    norm_and_rotate,
    norm_and_rotate_both,
    norm_and_rotate_both_halves,
    norm_and_rotate_halves,
    repeats_once,
    rotate_both_halves,
    rotate_halves,
    rotate_joined,
)


def tracing(layout: str) -> AbstractContextManager[Any]:
    """Within this, operators of torch and of the host's library are the rewritten ones."""
    return _Rewrites(layout)


_BY_CHANNELS = {"memory_format": torch.channels_last_3d}
_APPLY = f"{kitchen.PACKAGE}.apply_rope"
_NORM: dict[str, Callable[..., Any]] = {
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


def takes(ours: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether ours takes all that an operator of the library is called with; one that grew an
    argument is called as it is.
    """
    try:
        inspect.signature(ours).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


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
        #: What computes in place of the library's operators, by their names.
        self.of_the_library: dict[str, Callable[..., Any]] = {
            **_NORM,
            f"{_APPLY}1": self._rotate,
            _APPLY: self._rotate_both,
            _NORM_IN_PLACE: self._norm_in_place,
        }

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
            ours = self.of_the_library.get(name)
            if ours is not None and takes(ours, args, kwargs):
                func = ours
        return func(*args, **kwargs)

    def _cat(self, tensors: Any, dim: int = 0, **others: Any) -> torch.Tensor:
        plain = not others and not self._channels_last
        if dim != ROWS or not plain or any(tensor.dim() != 4 for tensor in tensors):
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
        if parts is None or table.shape[ROWS] != x.shape[ROWS]:
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
        return by_heads(q, k, table, q_scale, k_scale, epsilon, rounds=True)

    def _parts_normed_and_rotated(
        self, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same for what was joined from normed parts."""
        of_query, of_key = (_made_of(self._joined, x) or () for x in (query, key))
        if not of_query or len(of_query) != len(of_key) or table.dim() != 6:
            return None
        found, begin = [], 0
        for q, k in zip(of_query, of_key, strict=True):
            rows = q.shape[ROWS]
            both = self._normed_and_rotated(q, k, table.narrow(ROWS, begin, rows))
            if both is None:
                return None
            found.append(both)
            begin = begin + rows
        queries, keys = zip(*found, strict=True)
        return join_rows(queries), join_rows(keys)


def _made_of(made: _Made[Source], tensor: torch.Tensor) -> Source | None:
    """What a tensor was made from; None if it is not among these."""
    return next((source for result, source in made if result is tensor), None)
