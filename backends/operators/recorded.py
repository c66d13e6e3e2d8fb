"""Records the calls of others' parts of a region, and of another node's attention, in one call of
its graph.

When a graph is compared with the host's maths, the recorded results are used again: code that
counts its calls, or draws random numbers, is called only once, as without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from ..kinds.tolerance import RELATIVE_L2
from . import live_arguments

#: So many elements of each tensor are compared.
_SAMPLED = 2**16
#: In the place of a part's path: the attention that a node put into the call.
_ATTENTION = "attention of the call"

Attention = Callable[..., torch.Tensor]


class CalledOtherwiseError(RuntimeError):
    """The host's code calls such a part more often than its graph does."""


class RecordedCall:
    """One call of a region's graph."""

    def __init__(self, paths: Collection[str], attention: Attention | None = None) -> None:
        """Nothing was called yet.

        Args:
            paths: of the parts that are others'.
            attention: another node's; None without one.
        """
        self._paths, self._attention = paths, attention
        self._given: dict[str, list[torch.Tensor]] = {}
        self._results: dict[str, list[torch.Tensor]] = {}
        #: Whether a call is being made: what that calls in turn is its own.
        self._is_calling = False

    def clear(self) -> None:
        """Forget all: the graph is called again."""
        self._given.clear()
        self._results.clear()

    def call(
        self, path: str, given: Sequence[torch.Tensor], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Call a part; keep samples of its inputs and a copy of its result, because the graph
        writes there.
        """
        if self._is_calling:
            return compute()
        self._given.setdefault(path, []).extend(samples(given))
        self._is_calling = True
        try:
            result = compute()
        finally:
            self._is_calling = False
        self._results.setdefault(path, []).append(result.clone())
        return result

    @property
    def attending(self) -> Attention | None:
        """Calls the attention and notes it; None without one."""
        attention = self._attention
        if attention is None:
            return None

        def noted(function: Any, *args: Any, **named: Any) -> torch.Tensor:
            return self.call(_ATTENTION, args[:3], lambda: attention(function, *args, **named))

        return noted

    def attending_again(self, seen: dict[str, list[Any]]) -> Attention | None:
        """Return what repeats the attention's results, and notes its inputs in `seen`."""
        if self._attention is None:
            return None
        results = iter(self._results.get(_ATTENTION, ()))

        def again(function: Any, *args: Any, **named: Any) -> torch.Tensor:
            seen.setdefault(_ATTENTION, []).extend(samples(args[:3]))
            result = next(results, None)
            if result is None:
                raise CalledOtherwiseError(_ATTENTION)
            return result.clone()

        return again

    @property
    def given(self) -> list[torch.Tensor]:
        """Samples of the parts' inputs, in the order of their paths."""
        return in_order(self._given)

    def again(self, module: torch.nn.Module) -> tuple[dict[str, Again], dict[str, list[Any]]]:
        """Return modules, by the parts' paths, that repeat the parts' results, and a table that
        will hold samples of their inputs.

        Args:
            module: the live one, of the region.
        """
        seen: dict[str, list[Any]] = {}
        parts = {path: module.get_submodule(path) for path in self._paths}
        given = self._results.get
        return {path: Again(path, p, given(path, ()), seen) for path, p in parts.items()}, seen


class Again(torch.nn.Module):
    """Repeats a part's results in its place; otherwise like the part."""

    def __init__(
        self,
        path: str,
        part: torch.nn.Module,
        results: Sequence[torch.Tensor],
        seen: dict[str, list[Any]],
    ) -> None:
        super().__init__()
        self.__dict__["_part"] = part  # not below this one in the tree
        self._path, self._results, self._seen = path, iter(results), seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_part"], name)

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        given = list(_tensors((*args, *named.values())))
        self._seen.setdefault(self._path, []).extend(samples(given))
        result = next(self._results, None)
        if result is None:
            raise CalledOtherwiseError(self._path)
        return result.clone()  # which the host's code may write into


def in_order(table: dict[str, list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return all tensors of a table, in the order of its names."""
    return [tensor for path in sorted(table) for tensor in table[path]]


def samples(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of some elements of each comparable tensor."""
    found = []
    for tensor in tensors:
        if str(tensor.dtype).removeprefix("torch.") in RELATIVE_L2:
            every = (tensor.numel() // _SAMPLED) | 1  # odd, so that all columns are sampled
            found.append(tensor.reshape(-1)[::every].clone())
    return found


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if live_arguments.is_of_step(value):
            continue  # by its name in the graph
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
