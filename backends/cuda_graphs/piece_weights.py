"""The weights that a piece reads: where they lie, or copies of its own that they are written into.

Where weights come anew at each call, all places of a kind share one piece over one set of copies:
to copy them on the GPU takes a hundredth of what it takes to bring them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..operators.host_layer import Given
from ..weights.fetching import Fetched
from ..weights.streamed import copy_of, parts_of, rest_of
from .piece import form_of

#: Weights of so many bytes are kept as copies in any case.
_SMALL = 2**16


class Weights(Protocol):
    """What a piece reads.

    Attributes:
        tensors: what stands for the graph's weights while it is captured.
        given: likewise for those of layers that it leaves to the host; None: what is there.
    """

    tensors: list[torch.Tensor]
    given: Given | None

    def take(self, fetched: Fetched) -> bool:
        """Have the piece read these from now on; False where it cannot."""

    def forget(self) -> None:
        """Keep nothing that is the model's own."""

    @property
    def held_bytes(self) -> int:
        """What the copies hold of the device's memory."""


class InPlace(Weights):
    """Those of one place, which stay where they are; small ones are copies."""

    given = None

    def __init__(self, fetched: Fetched) -> None:
        """Look at what a call had."""
        self._fetched: Fetched | None = fetched
        self.tensors = [_copied(tensor) for tensor in fetched.tensors]
        self._copies = [tensor for tensor in self.tensors if _is_small(tensor)]
        # Of weights that have to be held, small parts were brought over for an epoch, and are
        # nobody's once that has ended. All others are the model's own.
        self._moves = fetched.release is not None
        parts = _parts(fetched)
        self._parts = [part for part in parts if self._moves and _is_small(part)]
        self._places = self._where(fetched.tensors, parts)

    def take(self, fetched: Fetched) -> bool:
        if fetched is self._fetched:
            return True
        parts = _parts(fetched)
        if self._moves != (fetched.release is not None):
            return False
        if self._where(fetched.tensors, parts) != self._places:
            return False
        live = [tensor for tensor in fetched.tensors if _is_small(tensor)]
        live += [part for part in parts if self._moves and _is_small(part)]
        _write(live, [*self._copies, *self._parts])
        self._fetched = fetched
        return True

    def forget(self) -> None:
        self._fetched = None
        self.tensors = []

    @property
    def held_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._copies)

    def _where(self, tensors: Sequence[Any], parts: Sequence[torch.Tensor]) -> list[Any]:
        """The addresses of what is read in its place, and the forms of the rest."""
        fixed = [form_of(each) if _is_small(each) else each.data_ptr() for each in tensors]
        return fixed + [
            form_of(each) if self._moves and _is_small(each) else each.data_ptr() for each in parts
        ]


class Copies(Weights):
    """Copies that the weights of any place of a kind are written into."""

    def __init__(self, fetched: Fetched) -> None:
        """Make room for such weights as a call had, with these in it."""
        with torch.inference_mode(False):
            self.tensors = [tensor.detach().clone() for tensor in fetched.tensors]
            pairs = {
                path: (_copy_of(weight), _copy_of(bias))
                for path, (weight, bias) in fetched.given.items()
            }
        self.given = pairs
        self._copies = [*self.tensors, *_parts(fetched._replace(given=pairs))]
        self._forms = _forms(fetched)

    def take(self, fetched: Fetched) -> bool:
        if _forms(fetched) != self._forms:
            return False
        _write([*fetched.tensors, *_parts(fetched)], self._copies)
        return True

    def forget(self) -> None:
        return

    @property
    def held_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._copies)


def _write(live: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> None:
    for mine, now in zip(kept, live, strict=True):
        if mine is not now:
            mine.copy_(now)


def _forms(fetched: Fetched) -> list[Any]:
    """All that weights are beside their numbers."""
    given = [
        (path, [each if each is None else rest_of(each) for each in pair])
        for path, pair in fetched.given.items()
    ]
    return [*map(form_of, fetched.tensors), *map(form_of, _parts(fetched)), *given]


def _parts(fetched: Fetched) -> list[torch.Tensor]:
    """The plain tensors that layers are multiplied by which a graph leaves to the host."""
    found: list[torch.Tensor] = []
    for pair in fetched.given.values():
        for tensor in pair:
            if tensor is not None:
                parts = parts_of(tensor)
                if parts is None:
                    raise RuntimeError(f"the parts of a {type(tensor).__name__} are not known")
                found += parts
    return found


def _copy_of(tensor: Any) -> Any:
    return None if tensor is None else copy_of(tensor)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.nbytes <= _SMALL


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_small(tensor):
        return tensor
    with torch.inference_mode(False):
        return tensor.detach().clone()
