"""The weights that a piece reads: in place, or as copies that they are written into.

Where weights are loaded at each call, all places of a kind share one piece over one set of copies:
a copy on the GPU takes a hundredth of the time to load them. All kinds have their copies in the
same memory, because each is done with them before the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from ..operators.call_context import Given
from ..torch_api.memory import copy_each
from ..weights.fetching import Fetched
from ..weights.streamed import made_of, parts_and_rest
from .piece import Statics, form_of

#: Weights of so many bytes are kept as copies in any case.
_SMALL = 2**16


class Weights(Protocol):
    """What a piece reads.

    Attributes:
        tensors: the graph's weights while it is captured.
        given: likewise for layers that it leaves to the host; None: as they are.
    """

    tensors: list[torch.Tensor]
    given: Given | None

    def take(self, fetched: Fetched) -> bool:
        """Have the piece read these from now on; False if it cannot."""

    def forget(self) -> None:
        """Keep nothing that is the model's own."""

    @property
    def held_bytes(self) -> int:
        """The device memory of its own copies."""


class InPlace(Weights):
    """Those of one place, which stay where they are; small ones are copies."""

    given = None

    def __init__(self, fetched: Fetched) -> None:
        """Inspect a call's weights."""
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
        """The addresses of what is read in place, and the forms of the rest."""
        fixed = [form_of(each) if _is_small(each) else each.data_ptr() for each in tensors]
        return fixed + [
            form_of(each) if self._moves and _is_small(each) else each.data_ptr() for each in parts
        ]


class Copies(Weights):
    """Copies that the weights of any place of a kind are written into."""

    held_bytes = 0  # in the same memory as other kinds' copies

    def __init__(self, fetched: Fetched, statics: Statics) -> None:
        """Make room for such weights as a call had, with these in it.

        Args:
            statics: where they lie.
        """
        live, self._forms = _apart(fetched)
        self._room, self._copies = statics.side_by_side(live)
        _write(live, self._copies)
        left = iter(self._copies)
        self.tensors = [next(left) for _ in fetched.tensors]
        self.given = {
            path: (_made_of(weight, left), _made_of(bias, left))
            for path, (weight, bias) in fetched.given.items()
        }

    def take(self, fetched: Fetched) -> bool:
        live, forms = _apart(fetched)
        if forms != self._forms:
            return False
        _write(live, self._copies)
        return True

    def forget(self) -> None:
        return


def _write(live: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> None:
    """Copy what is elsewhere, all small tensors of a dtype at once."""
    small: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for mine, now in zip(kept, live, strict=True):
        if mine is now:
            continue
        if _is_small(mine):
            into, values = small.setdefault(mine.dtype, ([], []))
            into.append(mine)
            values.append(now)
        else:
            mine.copy_(now)
    for into, values in small.values():
        copy_each(into, values)


def _apart(fetched: Fetched) -> tuple[list[torch.Tensor], list[Any]]:
    """The plain tensors that weights consist of, and their properties beside the values."""
    tensors = list(fetched.tensors)
    rests: list[Any] = []
    for path, pair in fetched.given.items():
        rests.append(path)
        for tensor in pair:
            parts, rest = ([], None) if tensor is None else _known(tensor)
            tensors += parts
            rests.append((len(parts), rest))
    return tensors, [*map(form_of, tensors), *rests]


def _parts(fetched: Fetched) -> list[torch.Tensor]:
    """The plain weight tensors of layers that a graph leaves to the host."""
    pairs = fetched.given.values()
    return [p for pair in pairs for each in pair if each is not None for p in _known(each)[0]]


def _known(tensor: Any) -> tuple[list[torch.Tensor], Any]:
    apart = parts_and_rest(tensor)
    if apart is None:
        raise RuntimeError(f"the parts of a {type(tensor).__name__} are not known")
    return apart


def _made_of(tensor: Any, parts: Iterator[torch.Tensor]) -> Any:
    return None if tensor is None else made_of(tensor, parts)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.nbytes <= _SMALL


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_small(tensor):
        return tensor
    with torch.inference_mode(False):
        return tensor.detach().clone()
