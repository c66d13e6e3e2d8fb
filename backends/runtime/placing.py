"""Our forwards in the modules of a root module, for as long as one call of it runs.

After it they are the host's again, so another branch that shares a module never meets a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..host_api.execution import pause_host_compiler

#: A module and the forward that it gets.
Placed = tuple[torch.nn.Module, Callable[..., Any]]


class Placing:
    """Puts forwards in place and takes them away."""

    def __init__(self) -> None:
        self._before: list[tuple[torch.nn.Module, Any]] = []
        #: Whether a call runs now.
        self.is_open = False

    @property
    def has_placed(self) -> bool:
        """Whether forwards of ours are in place now."""
        return bool(self._before)

    def run(
        self, call: Callable[[], Any], forwards: Sequence[Placed], *, compiled: bool = True
    ) -> Any:
        """Make one call with forwards in place for as long as it runs.

        Args:
            compiled: whether they are put in place at all.
        """
        self.is_open = True
        try:
            if compiled:
                self._place(forwards)
            with pause_host_compiler():
                return call()
        finally:
            self._take_away()
            self.is_open = False

    def replace(self, forwards: Sequence[Placed]) -> None:
        """Put others in their places while a call runs."""
        self._take_away()
        self._place(forwards)

    def _place(self, forwards: Sequence[Placed]) -> None:
        for module, forward in forwards:
            self._before.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = forward

    def _take_away(self) -> None:
        while self._before:
            module, before = self._before.pop()
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before
