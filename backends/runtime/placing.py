"""Our forwards in the modules of a root module, for as long as one call of it runs.

After it they are the host's again, so another branch that shares a module never meets a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..plans.plan import FORWARD, Placed


class Placing:
    """Puts forwards in place and takes them away."""

    def __init__(self) -> None:
        self._before: list[tuple[torch.nn.Module, str, Any]] = []
        self._placed: Sequence[Placed] = ()
        #: Whether a call runs now.
        self.is_open = False

    @property
    def has_placed(self) -> bool:
        """Whether our forwards are in place now."""
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
            return call()
        finally:
            self._take_away()
            self.is_open = False

    def replace(self, forwards: Sequence[Placed]) -> Sequence[Placed]:
        """Replace the forwards while a call runs; returns the previous ones."""
        before = self._placed
        self._take_away()
        self._place(forwards)
        return before

    def _place(self, forwards: Sequence[Placed]) -> None:
        self._placed = forwards
        for module, name, forward in forwards:
            self._before.append((module, name, module.__dict__.get(name)))
            module.__dict__[name] = forward

    def _take_away(self) -> None:
        self._placed = ()
        while self._before:
            module, name, before = self._before.pop()
            if before is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = before


@contextlib.contextmanager
def called_next(module: torch.nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Redirect the next call of a module to a function, which finds the module unchanged."""
    placing = Placing()

    def once(*args: Any, **kwargs: Any) -> Any:
        placing.replace(())
        return function(*args, **kwargs)

    placing.replace([(module, FORWARD, once)])
    try:
        yield
    finally:
        placing.replace(())


@contextlib.contextmanager
def unmarked(module: torch.nn.Module) -> Iterator[None]:
    """Undo what a call sets in a module's attributes: tensors there would outlive it."""
    own = module.__dict__
    before = dict(own)
    try:
        yield
    finally:
        for name in own.keys() - before.keys():
            del own[name]
        own.update(before)
