"""Others' code that calls blocks, and may replace forwards of their parts during a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any
from weakref import WeakMethod

import torch

from ..plans.plan import FORWARD, Placed
from .faults import STEP, Faults
from .placing import Placing

#: The forwards that parts have of their own, and how many hooks there are.
_Marks = tuple[list[Any], int]


class Within:
    """Inspects the model again within a step, as others have it then: where they say so, and, in
    steps that others' code leads, wherever parts of a called module have changed.
    """

    def __init__(
        self, placing: Placing, faults: Faults, renewed: Callable[[], Sequence[Placed] | None]
    ) -> None:
        """Set up.

        Args:
            placing: has our forwards in place.
            faults: what failed in our code.
            renewed: a method of the owner, which inspects the model without our forwards and
                returns those that serve it now; None if nothing changed.
        """
        self._placing, self._faults = placing, faults
        self._renewed = WeakMethod(renewed)  # else they would keep each other and the model alive
        self._is_led = False
        self._seen: dict[torch.nn.Module, tuple[_Parts, _Marks]] = {}

    def begin_step(self, installed: list[Placed], *, is_led: bool) -> list[Placed]:
        """Return the forwards that a step is to have in place; none is in place yet.

        Args:
            installed: our forwards.
            is_led: whether others' code calls their modules.
        """
        self._is_led = is_led
        return self._looking_first(installed) if is_led else installed

    def forget(self) -> None:
        """The model was inspected again: as it is now, without our forwards, it is known."""
        self._seen = {}

    def look(self) -> None:
        """Notice what others replaced since the step began, and leave it to them."""
        if self._placing.has_placed:
            self._faults.spare(STEP, "looking within a step", self._look)

    def _look(self) -> None:
        placed = self._placing.replace(())  # the model as the host and others have it
        renewed = self._renewed()
        if renewed is not None and (now := renewed()) is not None:
            placed = self._looking_first(now) if self._is_led else now
        self._placing.replace(placed)

    def _looking_first(self, installed: Sequence[Placed]) -> list[Placed]:
        placed = {module for module, _, _ in installed}
        if self._seen.keys() != placed:
            parts = {module: _Parts(module, placed) for module in placed}
            self._seen = {module: (each, each.marks()) for module, each in parts.items()}
        return [(each[0], each[1], partial(self._called, *each)) for each in installed]

    def _called(
        self,
        module: torch.nn.Module,
        name: str,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        parts, marks = self._seen[module]
        if parts.marks() == marks:
            return forward(*args, **kwargs)
        self.look()
        return getattr(module, name)(*args, **kwargs)


class _Parts:
    """What is within a module, except modules that have our forwards themselves."""

    def __init__(self, module: torch.nn.Module, placed: set[torch.nn.Module]) -> None:
        parts = [part for part in module.modules() if part not in placed]
        self._own = [part.__dict__ for part in parts]
        self._hooks: list[Any] = [
            hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)
        ]

    def marks(self) -> _Marks:
        return list(map(dict.get, self._own, repeat(FORWARD))), sum(map(len, self._hooks))
