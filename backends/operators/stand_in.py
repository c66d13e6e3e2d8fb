"""Stands in a twin for a part that a graph leaves to the host, as the host's code sees it.

The host's helpers inspect a layer before they use its weight themselves, to do more in one kernel:
the stand-in answers so that they call it instead. Any other question ends the build, with its name:
an answer other than the live part's would change the image.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import BuildError
from ..host_api.layers import CALLED_WHOLE, STATE
from ..reasons import Reason, of


class UnknownToGraphError(BuildError, AttributeError):
    """The host's code asks for something of such a part that a graph does not know.

    If it asks by `hasattr`, or with a default, it continues; then `refuse_questions` raises.
    """


class StandIn(torch.nn.Module):
    """Base of the parts that stand for a live one, which a graph calls by its path."""

    def __init__(self, path: str) -> None:
        """Set up for one live part.

        Args:
            path: where the live one is in the region's module.
        """
        super().__init__()
        self.path = path
        #: What the host's code asked for and did not get; torch's export puts lists back after it.
        self._asked: set[str] = set()

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse a call, if a part of this sort has none."""
        raise UnknownToGraphError(_reason(f"a call of {self.path}"))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in CALLED_WHOLE:
                return CALLED_WHOLE[name]
            if name in ("weight", "bias"):
                return Withheld(f"{name} of {self.path}")
            if name.startswith("__") or name in STATE or _asked_by_torch():
                raise
        self._asked.add(name)
        raise UnknownToGraphError(_reason(f"{name} of {self.path}"))


class Withheld:
    """A weight that no graph has: it can be inspected, not used."""

    def __init__(self, what: str) -> None:
        """Set up for one weight.

        Args:
            what: its name for people.
        """
        self._what = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownToGraphError(_reason(f"{name} of the {self._what}"))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        what = next(value._what for value in given if isinstance(value, cls))
        raise UnknownToGraphError(_reason(f"the {what}"))


def refuse_questions(parts: Iterable[torch.nn.Module]) -> None:
    """Raise if the host's code asked such parts for something that they do not know.

    Raises:
        UnknownToGraphError: it did.
    """
    for part in parts:
        if isinstance(part, StandIn) and part._asked:
            raise UnknownToGraphError(_reason(f"{min(part._asked)} of {part.path}"))


def _reason(what: str) -> Reason:
    return of("asks_unknown", what=what)


def _asked_by_torch() -> bool:
    """Whether it is torch's code that asks a module for an attribute."""
    asking = sys._getframe(2).f_globals.get("__name__", "")
    return bool(asking.partition(".")[0] == "torch")
