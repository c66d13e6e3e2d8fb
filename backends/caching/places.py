"""What is kept during one sampler run, for each kind of call in an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from .patches import Patch

V = TypeVar("V")


class EvaluationCall(NamedTuple):
    """One call among those that a sampler's evaluation makes.

    Attributes:
        shape: what must be equal for two calls to share what is kept, besides their patches.
        patches: what other nodes put into it (`patches.patches_of`).
        number: how many equal ones came before in the same evaluation: tiles, windows.
    """

    shape: Any
    patches: list[Patch]
    number: int


class Places(Generic[V]):
    """Finds what was kept of a call that equals this one in everything that shapes it."""

    def __init__(self) -> None:
        self._kept: list[tuple[EvaluationCall, V]] = []
        self._calls: list[EvaluationCall] = []

    def begin_evaluation(self) -> None:
        """The next call is the first of an evaluation."""
        self._calls.clear()

    def place(self, shape: Any, patches: list[Patch]) -> EvaluationCall:
        """Return a call's place, which differs from those of equal calls in the evaluation."""
        number = sum(known.shape == shape and known.patches == patches for known in self._calls)
        place = EvaluationCall(shape, patches, number)
        self._calls.append(place)
        return place

    def find(self, place: EvaluationCall) -> V | None:
        """Return what was kept of the last call at this place, or None."""
        return next((kept for known, kept in self._kept if known == place), None)

    def keep(self, place: EvaluationCall, thing: V) -> None:
        """Keep a thing in place of an older one."""
        self._kept = [each for each in self._kept if each[0] != place]
        self._kept.append((place, thing))

    def keep_only(self, is_wanted: Callable[[V], bool]) -> None:
        """Forget what is not needed any more."""
        self._kept = [each for each in self._kept if is_wanted(each[1])]

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def __iter__(self) -> Iterator[V]:
        """Iterate over all that is kept."""
        return (kept for _, kept in self._kept)
