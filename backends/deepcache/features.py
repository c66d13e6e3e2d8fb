"""The deep features of one sampler run: for each call of the UNet, the one that may be reused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .patches import Patch


class CallShape(NamedTuple):
    """What must be the same for two calls to share a feature, besides their patches.

    Attributes:
        chunks: the conditioning of each part of the batch, by the host's ids and in its order.
        frames: those of the context window that is computed, if one is.
        tensors: shape, dtype and device of the inputs.
        residuals: how many residuals each side of the UNet gets.
    """

    chunks: tuple[Any, ...]
    frames: tuple[int, ...]
    tensors: tuple[Any, ...]
    residuals: tuple[Any, ...]

    @property
    def structure(self) -> tuple[Any, ...]:
        """The same without whose conditioning it is."""
        return len(self.chunks), len(self.frames), self.tensors, self.residuals


class Place(NamedTuple):
    """One call among those that a sampler's evaluation makes.

    Attributes:
        patches: what other nodes put into it (`patches.patches_of`).
        number: how many like it came before in the same evaluation: tiles, windows, rows by rows.
    """

    shape: CallShape
    patches: list[Patch]
    number: int


class _Kept(NamedTuple):
    place: Place
    feature: torch.Tensor


class Features:
    """Finds the feature of a call that is like an earlier one in everything that shapes it."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._calls: list[Place] = []

    def begin_evaluation(self) -> None:
        """The next call is the first of an evaluation."""
        self._calls.clear()

    def place(self, shape: CallShape, patches: list[Patch]) -> Place:
        """Tell a call from those like it in the same evaluation."""
        number = sum(known.shape == shape and known.patches == patches for known in self._calls)
        place = Place(shape, patches, number)
        self._calls.append(place)
        return place

    def find(self, place: Place) -> torch.Tensor | None:
        """Return the feature of the last full call in this place, or None."""
        return next((kept.feature for kept in self._kept if kept.place == place), None)

    def keep(self, place: Place, feature: torch.Tensor) -> None:
        """Keep a feature in place of an older one."""
        self._kept = [kept for kept in self._kept if kept.place != place]
        self._kept.append(_Kept(place, feature))

    def clear(self) -> None:
        """Forget all, as a full step begins: what is absent in it has no feature after it."""
        self._kept.clear()

    @property
    def bytes(self) -> int:
        """Memory that the features hold."""
        return sum(k.feature.numel() * k.feature.element_size() for k in self._kept)


def shape_of(
    x: torch.Tensor,
    context: torch.Tensor | None,
    y: torch.Tensor | None,
    control: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> CallShape:
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
    frames = tuple(getattr(options.get("context_window"), "index_list", ()))
    return CallShape(chunks, frames, tensors, residuals)
