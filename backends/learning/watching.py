"""One step of a model, watched: how it calls its blocks, as data for a worker to learn from.

The blocks compute as always. Only sizes, dtypes and plain values are noted, which costs the
processor microseconds; no tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..errors import LearnError
from ..plans.plan import FORWARD, Placed
from ..reasons import Reason, of
from .arguments import write_down
from .blocks import LayerAttributes, blocks_of
from .calls import NotedCall
from .values import plain

Forward = Callable[..., Any]


class Seen:
    """One call of one block.

    Attributes:
        call: its arguments; None if they cannot be described.
        problem: why no graph could replace it.
    """

    def __init__(self) -> None:
        self.call: NotedCall | None = None
        self.problem: Reason | None = None

    def object_to(self, reason: Reason) -> None:
        """Note why no graph could replace it; the first reason stays."""
        self.problem = self.problem or reason

    def to_plain(self) -> dict[str, Any]:
        """Return its facts as JSON-plain data, and the problem."""
        problem = None if self.problem is None else self.problem.to_plain()
        facts = {} if self.call is None else self.call.facts
        return {**facts, "problem": problem}


class Watcher:
    """Watches one call of a root module.

    Attributes:
        seen: the calls of each block, by its name.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        """Set up, before the call: the model may set its blocks' attributes within it."""
        self.root = root
        self.blocks = blocks_of(root)
        self.seen: dict[str, list[Seen]] = {}
        self._settings = {name: LayerAttributes(block) for name, block in self.blocks.items()}

    def placed(self) -> list[Placed]:
        """Return what the blocks are to run in that call."""
        return [
            (block, FORWARD, partial(self._watch, name, block))
            for name, block in self.blocks.items()
        ]

    def _watch(self, name: str, block: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen = self._new()
        self.seen.setdefault(name, []).append(seen)
        if self._settings[name].have_changed():
            seen.object_to(of("learned_settings"))
        try:
            seen.call = NotedCall(block, args, kwargs)
        except LearnError as error:
            seen.object_to(error.reason)
        except Exception as error:  # an object's own code; it must not fail the user's image
            seen.object_to(of("learned_takes", sort=type(error).__name__))
        own = partial(type(block).forward, block)
        try:
            result = self._make(name, block, seen, partial(own, *args, **kwargs))
        except Exception as error:  # the model's code may catch it and go on
            reason = of("learned_raises", sort=type(error).__name__)
            seen.object_to(error.reason if isinstance(error, LearnError) else reason)
            raise
        if seen.call is not None:
            try:
                seen.call.end(result)
                if seen.call.has_changed():
                    seen.object_to(of("learned_changes_object"))
            except LearnError as error:
                seen.object_to(error.reason)
            except Exception as error:
                seen.object_to(of("learned_returns", sort=type(error).__name__))
        if self._settings[name].have_changed():
            seen.object_to(of("learned_settings"))
        return result

    def _new(self) -> Seen:
        return Seen()

    def _make(self, name: str, block: torch.nn.Module, seen: Seen, own: Callable[[], Any]) -> Any:
        """Make a block's call as the host does."""
        return own()

    def to_plain(self) -> list[Any]:
        """Return all that was seen, as JSON-plain data."""
        return [[name, [each.to_plain() for each in calls]] for name, calls in self.seen.items()]


class Watched:
    """The first call of a root module while its forward is in place (`placed`).

    Attributes:
        facts: the call and its blocks' calls as JSON-plain data; None before it was made.
    """

    def __init__(self, root: torch.nn.Module, run: Callable[[Forward, list[Placed]], Any]) -> None:
        """Set up.

        Args:
            root: the module whose call it is.
            run: makes a call with these forwards in place of the blocks' own.
        """
        self._root, self._run = root, run
        self.facts: dict[str, Any] | None = None

    def placed(self) -> list[Placed]:
        """Return what the root is to run."""
        return [(self._root, FORWARD, self.forward)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Make a call of the root; the first one is watched."""
        own = partial(type(self._root).forward, self._root, *args, **kwargs)
        if self.facts is not None:
            return own()
        self.facts = {}  # of this call, whatever its outcome
        facts = write_down(args, kwargs)
        watcher = Watcher(self._root)
        result = self._run(own, watcher.placed())
        self.facts = {**facts, "blocks": watcher.to_plain()}
        return result


def task(name: str, settings: Mapping[str, Any], dtype: torch.dtype, facts: Any) -> dict[str, Any]:
    """Return what a worker learns from, as JSON-plain data.

    Args:
        name: of the model's class in the host's list.
        settings: as the host's detection reads them from its file.
        dtype: that the model computes in.
        facts: what was watched (`Watched`).

    Raises:
        LearnError: the settings are not plain data.
    """
    return {
        "model": name,
        "settings": plain(dict(settings)),
        "dtype": str(dtype).removeprefix("torch."),
        "watched": facts,
    }
