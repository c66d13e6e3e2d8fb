"""The state of a model's parts before a step that must leave no change."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import torch

#: Of exactly these: what another class holds is its own affair.
_CONTAINERS = (list, dict, OrderedDict, set, deque)


class Standing:
    """The attributes of parts, including parameters, buffers and children, and the contents of
    plain containers there; not tensors' values, nor nested contents.
    """

    def __init__(self, parts: Iterable[torch.nn.Module]) -> None:
        """Note the state.

        Args:
            parts: each without what is below it.
        """
        owns = [part.__dict__ for part in parts]
        held = [value for own in owns for value in own.values() if type(value) in _CONTAINERS]
        self._noted = [(each, _contents(each)) for each in (*owns, *held)]

    def put_back(self) -> None:
        """Restore the state."""
        for container, before in self._noted:
            now = _contents(container)
            if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                _fill(container, before)


def _contents(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    return list(container)


def _fill(container: Any, contents: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        half = len(contents) // 2
        container.update(zip(contents[:half], contents[half:], strict=True))
    elif isinstance(container, set):
        container.update(contents)
    else:
        container.extend(contents)
