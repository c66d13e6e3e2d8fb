"""What a block's code does in one call on fakes: which memory it writes into, whether it draws
random numbers, which operators it runs, and how it attends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import BuildError
from ..host_api import attention
from ..operators import host_attention
from ..torch_api.fakes import Operators, is_random, memory_of, operator_text, written_by
from .options import ReadOptions
from .values import OPTIONS

#: How a block attends: by the host's functions with the step's options, by them without any, so
#: that the host's code is traced into the graph, or not at all by these.
LIVE, BARE, TRACED, NONE = "live", "bare", "traced", "none"


class Notes:
    """Notes of one call."""

    def __init__(self, own: Any) -> None:
        """Set up.

        Args:
            own: the host's attention, for calls that the operator cannot take.
        """
        self._own = own
        self.is_random = False
        #: Operators by name, shapes and plain values, in order.
        self.stream: list[Any] = []
        self._written: list[torch.Tensor] = []  # kept, so that no other tensor gets its memory
        self._attends: set[str] = set()

    def note(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Note an operator."""
        self.is_random = self.is_random or is_random(function)
        self.stream.append((operator_text(function), _shapes(args), _shapes(named)))
        self._written += written_by(function, args, named)

    @property
    def names(self) -> list[str]:
        """The operators by name alone."""
        return [name for name, *_ in self.stream]

    @property
    def written(self) -> set[int]:
        """The memory that is written into."""
        return set(map(memory_of, self._written))

    @property
    def attends(self) -> str:
        """`LIVE`, `BARE`, `TRACED` or `NONE`."""
        if len(self._attends) > 1:
            return TRACED
        return next(iter(self._attends), NONE)

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the host's attention. It does not count as reading the step's options, or a
        trace would depend on all that is passed with them.
        """
        given = {name: value for name, value in kwargs.items() if name != OPTIONS}
        try:
            result = host_attention.stand_in(*args, **given)
        except BuildError:  # the operator does not know the arguments
            self._attends.add(TRACED)
            return self._own(*args, **kwargs)
        self._attends.add(LIVE if isinstance(kwargs.get(OPTIONS), ReadOptions) else BARE)
        return result


class Listener:
    """Notes what is computed.

    Attributes:
        notes: of the current call.
    """

    def __init__(self) -> None:
        self._own = attention.replaceable()
        self.notes = Notes(self._own)

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """Until this ends, notes stand in for the host's attention."""

        def attend(*args: Any, **kwargs: Any) -> Any:
            return self.notes.attend(*args, **kwargs)

        with attention.answered_by(attend):
            yield

    @contextlib.contextmanager
    def noting(self) -> Iterator[Notes]:
        """Until this ends, note what is computed separately."""
        around, self.notes = self.notes, Notes(self._own)
        try:
            yield self.notes
        finally:
            self.notes = around

    def operators(self) -> Operators:
        """Return the mode in which operators are noted."""
        return Operators(lambda *operator: self.notes.note(*operator))


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return tuple(map(_shapes, value))
    if isinstance(value, dict):
        return tuple((name, _shapes(each)) for name, each in value.items())
    return repr(value)
