"""What a way is in which a model's weights come: one class each, all asked alike."""

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
    """What a source gave of some modules for one call.

    Attributes:
        name: what such weights are called, of the source or of one that they came like.
        may_be_kept: whether they stay until the epoch ends, while the source's signature does.
        release: to be called once the work that uses them is queued.
    """

    pairs: Pairs
    name: str
    may_be_kept: bool
    release: Callable[[], None] | None = None


class WeightSource(Protocol):
    """One way in which weights of a loaded model come to where they are used.

    Attributes:
        name: what weights of it are called; comparisons are kept on disk by it.
        holds: whether what it gives and may be kept has to be held, and `hold` tells whether it is
            still there; else that are the modules' parameters themselves, until one is replaced.
    """

    name: str
    holds: bool = False

    def takes(self, module: Any) -> bool:
        """Tell whether a module's weights come this way now, if no source further away takes it."""

    def fetch(self, modules: Sequence[Any]) -> Brought:
        """Return the weights of modules that it takes.

        Raises:
            NoRoomError: there is not even room to bring all of them over at once.
        """

    def hold(self) -> bytes | None:
        """Keep what was given and may be kept in place; `release` must follow once the work that
        uses it is queued.

        Returns:
            A signature, equal for the same weights; None where they cannot be kept now.
        """
        return b""

    def release(self) -> None:
        """Undo one `hold` that gave a signature."""
        return

    def make_room(self, size: int) -> None:
        """Give up so many bytes of the device's memory, where weights may come anew at each call
        just as well.
        """
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
    """Tell whether a module computes with these weights of it as they are."""
    return not has_functions(module) and all(w is None or w.dtype == dtype for w in pair)


def same_device(a: torch.device, b: torch.device) -> bool:
    """Tell whether two devices are one, index 0 being meant where none is given."""
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def lies_elsewhere(module: Any, device: torch.device) -> bool:
    """Tell whether a weight of a module has to be brought to a device."""
    return any(w is not None and not same_device(w.device, device) for w in pair_of(module))
