"""The deep features of one sampler run: for each call of the UNet, the one that may be reused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

_PATCHES = ("patches", "patches_replace")
_CALLABLES = ("optimized_attention_override",)


class Form(NamedTuple):
    """What must be the same for two calls to share a feature, besides their patches.

    Attributes:
        chunks: the conditioning of each part of the batch, by the host's ids and in its order.
        tensors: shape, dtype and device of the inputs.
        residuals: how many residuals each side of the UNet gets.
    """

    chunks: tuple[Any, ...]
    tensors: tuple[Any, ...]
    residuals: tuple[Any, ...]

    @property
    def structure(self) -> tuple[Any, ...]:
        """The same without whose conditioning it is."""
        return len(self.chunks), self.tensors, self.residuals


class _Kept(NamedTuple):
    form: Form
    patches: list[Any]
    feature: torch.Tensor


class Features:
    """Finds the feature of a call that is like an earlier one in everything that shapes it."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def find(self, form: Form, patches: list[Any]) -> torch.Tensor | None:
        """Return the feature of the last full call of this form under these patches, or None."""
        for kept in self._kept:
            if kept.form == form and kept.patches == patches:
                return kept.feature
        return None

    def keep(self, form: Form, patches: list[Any], feature: torch.Tensor) -> None:
        """Keep a feature in place of an older one."""
        self.drop(form, patches)
        self._kept.append(_Kept(form, patches, feature))

    def drop(self, form: Form, patches: list[Any]) -> None:
        """Forget what is kept for calls of this form."""
        self._kept = [k for k in self._kept if k.form != form or k.patches != patches]

    @property
    def bytes(self) -> int:
        """Memory that the features hold."""
        return sum(k.feature.numel() * k.feature.element_size() for k in self._kept)


def form_of(
    x: torch.Tensor,
    context: torch.Tensor | None,
    y: torch.Tensor | None,
    control: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Form:
    """Describe a call of the UNet; no tensor's content is read."""
    chunks = tuple(zip(options.get("uuids", ()), options.get("cond_or_uncond", ()), strict=False))
    tensors = tuple(
        None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.device)
        for tensor in (x, context, y)
    )
    residuals = tuple(
        (side, tuple(r is not None for r in given))
        for side, given in sorted((control or {}).items())
        if isinstance(given, (list, tuple))
    )
    return Form(chunks, tensors, residuals)


def patches_of(options: Mapping[str, Any]) -> list[tuple[str, Any, list[Any]]]:
    """List all that other nodes put into a call, by kind and place, to be compared by `==`:
    functions and objects are equal to themselves, and a method is to another binding of it.
    """
    found: list[tuple[str, Any, list[Any]]] = []
    for name in _PATCHES:
        for place, given in (options.get(name) or {}).items():
            items = list(given.items()) if isinstance(given, Mapping) else list(given)
            found.append((name, place, items))
    found += [(name, None, [options[name]]) for name in _CALLABLES if name in options]
    return found
