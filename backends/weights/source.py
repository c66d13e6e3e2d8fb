"""The protocol of weight sources: a class for each way in which a model's weights reach a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..host_api.layers import has_functions

#: (weight, bias) of modules, by their ids.
Pairs = dict[int, tuple[Any, Any]]


class NoRoomError(ValueError):
    """There is no room for weights that were asked for together."""


class Brought(NamedTuple):
    """The weights of some modules that a source fetched for one call.

    Attributes:
        name: of such weights: the source's, or another one's whose way they came.
        may_be_kept: whether they stay until the epoch ends, as long as the source's signature
            holds.
        release: to be called once the work that uses them is queued.
    """

    pairs: Pairs
    name: str
    may_be_kept: bool
    release: Callable[[], None] | None = None


class WeightSource(Protocol):
    """One way in which weights of a loaded model reach the device that uses them.

    Attributes:
        name: of its weights; comparisons hold for it.
        holds: whether kept weights must be held, so that `hold` tells whether they are still there;
            else they are the modules' parameters themselves, until one is replaced.
    """

    name: str
    holds: bool = False

    def takes(self, module: Any) -> bool:
        """Tell whether a module's weights come this way now, unless a further source takes it."""

    def fetch(self, modules: Sequence[Any]) -> Brought:
        """Return the weights of modules that it takes.

        Raises:
            NoRoomError: there is no room to copy all of them at once.
        """

    def hold(self) -> bytes | None:
        """Keep kept weights in place; `release` must follow once the work that uses them is queued.

        Returns:
            A signature, equal for the same weights; None if they cannot be kept now.
        """
        return b""

    def release(self) -> None:
        """Undo one `hold` that returned a signature."""
        return

    def make_room(self, size: int) -> None:
        """Free so many bytes of the device, if weights may as well be loaded at each call."""
        return

    def begin_run(self) -> None:
        """Hold nothing: the host may have loaded, moved or patched anything."""
        return

    def begin_step(self) -> None:
        """Look at the room anew."""
        return

    def begin_epoch(self) -> None:
        """Keep nothing."""
        return


def pair_of(module: Any) -> tuple[Any, Any]:
    """Return a module's own weight and bias."""
    return module.weight, module.bias


def is_final(module: Any, pair: tuple[Any, Any], dtype: torch.dtype) -> bool:
    """Tell whether a module computes with these weights as they are."""
    return not has_functions(module) and all(w is None or w.dtype == dtype for w in pair)


def same_device(a: torch.device, b: torch.device) -> bool:
    """Tell whether two devices are the same; without an index 0 is meant."""
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def lies_elsewhere(module: Any, device: torch.device) -> bool:
    """Tell whether a module's weight must be copied to a device."""
    return any(w is not None and not same_device(w.device, device) for w in pair_of(module))
